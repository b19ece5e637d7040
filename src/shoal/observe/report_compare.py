"""Several runs on one page: their results, and what differs between their configs."""

from collections.abc import Sequence
from typing import Any

from shoal.config.run import BLOCKS_OF_SCRIPT, MADE_BY_SCRIPT
from shoal.observe import figures
from shoal.observe.html import Child, Html, section, table, tag
from shoal.observe.report import CHARTS, badge, loss_text
from shoal.observe.report_setup import objective
from shoal.observe.results import results_of
from shoal.observe.run_reader import RunRecord

LONGEST_VALUE = 80
COLOURS = 8  # after them, they come again with dashed lines
Labelled = Sequence[tuple[str, RunRecord]]
# They differ between any two runs, and say nothing.
UNINTERESTING = ("name", "run_dir")
# Keys whose value a run may choose → its name in `plan.json`.
CHOSEN = {
    ("parallel", "strategy"): "strategy",
    ("train", "micro_batch"): "micro_batch",
    ("train", "global_batch"): "global_batch",
    ("train", "recompute"): "recompute",
    ("checkpoint", "every"): "checkpoint_every",
}


def compared_sections(runs: Labelled) -> list[Html]:
    """The sections of the page that compares runs."""
    return [_headline(runs), _results(runs), CHARTS, _differences(runs)]


def labels_of(runs: Sequence[RunRecord]) -> list[tuple[str, RunRecord]]:
    """Each run with its name, or with its folder if another has the same name."""
    names = [run.name for run in runs]
    return [(run.name if names.count(run.name) == 1 else str(run.path), run) for run in runs]


def _headline(runs: Labelled) -> Html:
    names = ", ".join(label for label, _ in runs)
    read = max(run.read for _, run in runs)
    return tag(
        "header",
        tag("div", tag("h1", f"{len(runs)} runs compared"), class_="title"),
        tag("p", names, class_="subtitle"),
        tag("p", f"as of {figures.moment(read)}", class_="faint"),
        id="headline",
        data_live=True,
    )


def swatch(index: int) -> Html:
    """The colour of a run's curves."""
    return tag("span", class_=f"swatch part-{index % COLOURS + 1}{'' if index < COLOURS else ' dashed'}")


def _results(runs: Labelled) -> Html:
    found = [(label, run, results_of(run)) for label, run in runs]
    columns: dict[str, list[Child]] = {
        "run": [[swatch(index), label] for index, (label, _, _) in enumerate(found)],
        "state": [badge(run.state) for _, run, _ in found],
        "objective": _if_differing([objective(run) or figures.NONE for _, run, _ in found]),
        "step": [f"{figures.count(run.step)} / {figures.count(run.steps)}" for _, run, _ in found],
        "loss": [loss_text(run, one) for _, run, one in found],
        "best eval loss": [figures.decimal(one.best_eval_loss) for _, _, one in found],
        "tokens": [figures.compact(one.tokens) for _, _, one in found],
        "tokens/s": [figures.count(one.tokens_per_second) for _, _, one in found],
        "samples": [figures.compact(one.samples) for _, _, one in found],
        "samples/s": [figures.count(one.samples_per_second) for _, _, one in found],
        "MFU": [figures.percent(one.mfu) for _, _, one in found],
        "peak memory": [figures.gib(one.memory_gib) for _, _, one in found],
        "time": [figures.seconds(one.seconds) for _, _, one in found],
        "restarts": [str(one.restarts) for _, _, one in found],
    }
    known = {name: cells for name, cells in columns.items() if any(cell != figures.NONE for cell in cells)}
    rows = list(zip(*known.values(), strict=True))
    reasons = [tag("p", f"{label}: {run.detail}", class_="problem") for label, run, _ in found if run.detail]
    notes = [tag("p", note, class_="faint") for note in _incomparable([run for _, run in runs])]
    return section("results", "Results", table(tuple(known), rows, label="Results"), reasons, notes)


def _if_differing(cells: list[str]) -> list[Child]:
    """The cells of a column; those of one that says the same of every run are left out."""
    return [figures.NONE for _ in cells] if len(set(cells)) == 1 else list(cells)


def _incomparable(runs: Sequence[RunRecord]) -> list[str]:
    """What a reader of the curves has to know: whose losses are of different things, and whose steps are."""
    configured = [run for run in runs if not run.custom]
    loss_of: dict[str, set[str | None]] = {
        "objective": {objective(run) for run in runs},
        "tokenizer": {str(found) for run in configured if (found := run.get("model", "tokenizer")) is not None},
        "data": {str([run.get("data", key) for key in ("source", "path")]) for run in configured},
    }
    differing = [name for name, values in loss_of.items() if len(values) > 1]
    notes = []
    if differing:
        notes.append(f"The runs differ in {_listed(differing)}, so their losses are of different things.")
    batches = {(run.planned("chosen", "global_batch"), run.get("data", "max_length")) for run in configured}
    if len(batches) > 1:
        notes.append(
            "Their steps have different numbers of tokens: choose tokens as the axis to compare equal amounts."
        )
    return notes


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def _differences(runs: Labelled) -> Html:
    found = config_differences([effective_config(run) for _, run in runs])
    if not found:
        return section("differences", "Config", tag("p", "The configs are the same."))
    rows = [(key, *(_shown(value) for value in values)) for key, values in found.items()]
    head = ("key", *([swatch(index), label] for index, (label, _) in enumerate(runs)))
    return section("differences", "Config differences", table(head, rows, numbers=False, label="Config differences"))


def effective_config(run: RunRecord) -> dict[str, Any]:
    """The config as it was used: with what was chosen for each auto. That of a custom loop is silent on what its script
    makes."""
    config = {**run.config}
    for (block, key), chosen in CHOSEN.items():
        values, value = config.get(block), run.planned("chosen", chosen)
        if value is not None and isinstance(values, dict) and key in values:
            config[block] = {**values, key: f"{value} (auto)" if values[key] == "auto" else value}
    if run.custom:
        train = config.get("train")
        config |= dict.fromkeys(BLOCKS_OF_SCRIPT, UNSAID)
        config["train"] = (train if isinstance(train, dict) else {}) | dict.fromkeys(MADE_BY_SCRIPT, UNSAID)
    return config


def config_differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Dotted key → its value in each config, for keys that are not the same in all that say something."""
    flat = [dict(_flattened(config)) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    # One config may have a block where another has null.
    leaves = [
        key for key in keys if key not in UNINTERESTING and not any(other.startswith(f"{key}.") for other in keys)
    ]
    found = {key: [_value(one, key) for one in flat] for key in leaves}
    said = {key: [value for value in values if value is not UNSAID] for key, values in found.items()}
    return {key: found[key] for key, values in said.items() if any(value != values[0] for value in values)}


def _value(flat: dict[str, Any], key: str) -> Any:
    """The value of a key, also below a block that says nothing."""
    above = [key.rsplit(".", count)[0] for count in range(key.count(".") + 1)]
    return next((flat[one] for one in above if (one == key and one in flat) or flat.get(one) is UNSAID), MISSING)


MISSING, UNSAID = object(), object()


def _flattened(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += (
            _flattened(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(f"{prefix}{key}", value)]
        )
    return found


def _shown(value: Any) -> str:
    text = figures.NONE if value is MISSING or value is UNSAID else "null" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
