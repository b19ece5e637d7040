"""Several runs on one page: their results, and what differs between their configs."""

from collections.abc import Sequence
from typing import Any

from shoal.observe import figures
from shoal.observe.html import Html, section, table, tag
from shoal.observe.report import CHARTS, badge
from shoal.observe.results import results_of
from shoal.observe.run_reader import RunRecord

LONGEST_VALUE = 80
Labelled = Sequence[tuple[str, RunRecord]]
# They differ between any two runs, and say nothing.
UNINTERESTING = ("name", "run_dir")


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


def _results(runs: Labelled) -> Html:
    rows = []
    for index, (label, run) in enumerate(runs):
        found = results_of(run)
        rows.append(
            (
                [tag("span", class_=f"swatch part-{index % 8 + 1}"), label],
                badge(run.state),
                f"{figures.count(run.step)} / {figures.count(run.steps)}",
                figures.decimal(found.loss),
                figures.decimal(found.best_eval_loss),
                figures.compact(found.tokens),
                figures.count(found.tokens_per_second),
                figures.percent(found.mfu),
                figures.gib(found.memory_gib),
                figures.seconds(found.seconds),
                str(found.restarts),
            )
        )
    head = (
        "run",
        "state",
        "step",
        "loss",
        "best eval loss",
        "tokens",
        "tokens/s",
        "MFU",
        "peak memory",
        "time",
        "restarts",
    )
    return section("results", "Results", table(head, rows, label="Results"))


def _differences(runs: Labelled) -> Html:
    found = config_differences([run.config for _, run in runs])
    if not found:
        return section("differences", "Config", tag("p", "The configs are the same."))
    rows = [(key, *(_shown(value) for value in values)) for key, values in found.items()]
    head = ("key", *(label for label, _ in runs))
    return section("differences", "Config differences", table(head, rows, numbers=False, label="Config differences"))


def config_differences(configs: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Dotted key → its value in each config, for keys that are not the same in all."""
    flat = [dict(_flattened(config)) for config in configs]
    keys = dict.fromkeys(key for one in flat for key in one)
    found = {key: [one.get(key, MISSING) for one in flat] for key in keys if key not in UNINTERESTING}
    return {key: values for key, values in found.items() if any(value != values[0] for value in values)}


MISSING = object()


def _flattened(values: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in values.items():
        found += (
            _flattened(value, f"{prefix}{key}.") if isinstance(value, dict) and value else [(f"{prefix}{key}", value)]
        )
    return found


def _shown(value: Any) -> str:
    text = figures.NONE if value is MISSING else "null" if value is None else str(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
