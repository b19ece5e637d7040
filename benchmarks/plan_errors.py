"""Three errors of the forecast, told apart, as a report and as the table of docs/plan-accuracy.md.

    python benchmarks/plan_errors.py [--held-out]

Of our own runs; of systems that are modelled, that is the rows of `data/`, with which traits and constants were chosen;
and of other sources (`plan_published.py`), which were in view while terms were corrected. The rows of a source that a
constant was chosen from are among the last ones too, with the constant as it would be without that source (`WITHOUT`).
Writes `plan/published/errors.md` and `errors.json`. With `--held-out` it computes the error of the sources that were
kept aside, and writes that instead, with the error of each figure: once, when everything else is done.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from plan_accuracy import TRAITS, read_rows
from plan_accuracy import compare as compare_known
from plan_named import named_figures
from plan_published import FOLDER, ROOT, Figure, Published, compare, read_measured, read_published, spread
from sweeps.forecast import compare as compare_sweep
from sweeps.report import read_records

from shoal.catalogue import efficiency
from shoal.catalogue.efficiency import FAMILIES, Efficiency
from shoal.plan.speed.attention import FLASH_2
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.speed.host import host_seconds

# The tables in docs/plan-accuracy.md are between these: the three errors, and those of the sets that were held out.
BEGIN, BEGIN_UNSEEN = "<!-- begin: benchmarks/plan_errors.py -->", "<!-- begin: benchmarks/plan_errors.py, unseen -->"
END = "<!-- end -->"
# Runs of other systems on an H200, below benchmarks/gpu, and the sources of those that a random generator chose.
DRAWN_FOLDERS = ("deepspeed", "megatron", "llama_factory", "axolotl", "litgpt", "torchtune")
MEASURED = (
    *("trainer_h200/trainer.jsonl", "trainer_h200/drawn.jsonl"),
    *(f"drawn_h200/{name}.jsonl" for name in ("sft", "loops", "unsloth")),
    *(f"mixtures_h200/{name}.jsonl" for name in ("transformers5", "transformers4")),
    *(f"{name}_h200/drawn.jsonl" for name in DRAWN_FOLDERS),
)
MIXTURES = "mixtures-h200-drawn"
ONE_BY_ONE = ("trainer", "sft", "loops", "unsloth", *(name.replace("_", "-") for name in DRAWN_FOLDERS))
DRAWN = {f"{name}-h200-drawn" for name in ONE_BY_ONE} | {MIXTURES}
# Sets that are also told together, from the error of each figure in `first.json`.
TOGETHER = {
    "the eighth to the eleventh together": tuple(
        f"the {which} held-out set, as the command is asked" for which in ("eighth", "ninth", "tenth", "eleventh")
    )
}
KINDS = ("full", "LoRA", "QLoRA")
# The share of a step from which on its time may be the host's.
WAITING = 0.7
# Errors from here on are listed one by one, with what is not known about the run.
UNEXPLAINED = 0.25


@dataclass(frozen=True)
class Without:
    """The efficiencies that were chosen from a source, and what they would be without it."""

    source: str  # as the labels of `plan_accuracy` begin
    gpus: tuple[str, ...]
    instead: Efficiency
    because: str


# Constants that a source of `data/` was used for. Those of the other devices are from matmul benchmarks, of nobody's
# training: catalogue/efficiency.py.
WITHOUT = (
    Without(
        "llm-foundry",
        ("a100-40gb", "a100-80gb"),
        # The A100's large matmuls reach 0.826 of its peak.
        Efficiency(matmuls=0.98 * 0.826, attention=0.83 * 0.826, bandwidth=0.64, fp8=0.62, half_keys=200),
        "the A100's matmul benchmarks, with the H200's share of training in them and the 4090's ratio of attention",
    ),
    Without(
        "llm-foundry",
        ("h100-80gb",),
        replace(FAMILIES["h200"], attention=FLASH_2 * FAMILIES["h200"].attention),
        "the H200's, with flash attention 2 as measured on it",
    ),
    Without(
        "torchtitan",
        ("h100-96gb",),
        replace(
            FAMILIES["h200"], matmuls=0.894 * FAMILIES["h200"].matmuls, attention=0.894 * FAMILIES["h200"].attention
        ),
        "the H200's at the clock that 500 of 700 W sustain (power grows with its cube)",
    ),
)


@contextmanager
def without(choice: Without) -> Iterator[None]:
    """The forecast with the efficiencies that would have been chosen without a source."""
    held = dict(FAMILIES), dict(efficiency._OLD_HOPPER)
    FAMILIES.update(dict.fromkeys(choice.gpus, choice.instead))
    if "h100-80gb" in choice.gpus:
        efficiency._OLD_HOPPER[2023] = choice.instead
    forecast_speed.cache_clear()
    try:
        yield
    finally:
        FAMILIES.update(held[0])
        efficiency._OLD_HOPPER.update(held[1])
        forecast_speed.cache_clear()


def known() -> tuple[list[Figure], list[Figure]]:
    """(our own runs, systems that are modelled): the rows of `data/`, and those that were measured on an H200."""
    measured = ROOT / "benchmarks" / "gpu"
    rows = [row for file in MEASURED for row in read_measured(measured / file)]
    own, modelled = [], compare(rows)
    for record in compare_sweep(list(read_records(ROOT / "benchmarks" / "gpu" / "sweep_h200" / "sweep.json").values())):
        if record.figure != "allocated_gib":
            row = Published("our own runs", record.row, "full", None, None, "", None, "", ())
            what = "memory" if record.figure == "reserved_gib" else "speed"
            own.append(Figure(row, what, record.measured, record.forecast))
    for one in compare_known(read_rows()):
        ours = one.row.run.traits == TRAITS["shoal"]
        (own if ours else modelled).append(_of_known(one, "our own runs" if ours else ""))
    return own, modelled


def left_out() -> list[Figure]:
    """The rows of `data/` whose source a constant was chosen from, without that source. Memory has no such constant."""
    found = []
    for choice in WITHOUT:
        rows = [
            row
            for row in read_rows()
            if row.label.startswith(choice.source) and row.run.gpu.name in choice.gpus and row.tokens is not None
        ]
        with without(choice):
            found += [_of_known(one, f"{choice.source}*") for one in compare_known(rows) if one.what == "speed"]
    return found


def _of_known(one: Any, source: str) -> Figure:
    adapter = one.row.run.adapter
    kind = "full" if adapter is None else "QLoRA" if adapter.quantize else "LoRA"
    source = source or one.row.label.split(" ")[0]
    row = Published(source, one.row.label, kind, one.row.run, None, "", None, "", ())
    return Figure(row, one.what, one.published, one.forecast)


def cells(figures: list[Figure]) -> list[str]:
    """Number, median and 90th percentile of memory and of speed."""
    return cells_of([(one.what, one.error) for one in figures])


def cells_of(found: list[tuple[str, float]]) -> list[str]:
    """The same of pairs of what a figure is and its error."""
    shown = []
    for what in ("memory", "speed"):
        some = [error for kind, error in found if kind == what]
        if not some:
            shown += ["", "", ""]
            continue
        median, ninety, _ = spread(some)
        shown += [str(len(some)), f"{median:.1%}", f"{ninety:.1%}"]
    return shown


def add_together() -> None:
    """Writes the sets of `TOGETHER` into `first.json`."""
    first = json.loads((FOLDER / "first.json").read_text())
    for name, sets in TOGETHER.items():
        figures = [error for one in sets for error in first[one]["errors"]]
        first[name] = {
            "sources": {source: row for one in sets for source, row in first[one]["sources"].items()},
            "kinds": {
                kind: cells_of([(what, error) for _, of_kind, what, error in figures if of_kind == kind])
                for kind in KINDS
            },
            "all": cells_of([(what, error) for _, _, what, error in figures]),
        }
    (FOLDER / "first.json").write_text(json.dumps(first, indent=1) + "\n")


HEAD = [
    "| rows | memory figures | median | 90th percentile | speed figures | median | 90th percentile |",
    "| --- | --- | --- | --- | --- | --- | --- |",
]


def line(name: str, figures: list[Figure]) -> str:
    return f"| {' | '.join([name, *cells(figures)])} |"


def groups(unseen: list[Figure]) -> list[tuple[str, list[Figure]]]:
    """The three errors, and the last one by kind of training."""
    own, modelled = known()
    again, drawn = left_out(), [one for one in modelled if one.row.source in DRAWN]
    new, unseen = unseen, unseen + again
    return [
        ("our own runs", own),
        ("systems that are modelled", modelled),
        ("– runs on an H200 drawn at random", drawn),
        ("– of these, steps that hardly wait for their host", [one for one in drawn if _hardly_waits(one)]),
        (
            "– of these, with the speed of their host measured beside them",
            [one for one in drawn if one.row.run is not None and one.row.run.host_block_ms is not None],
        ),
        ("– of these, mixtures of experts", [one for one in drawn if one.row.source == MIXTURES]),
        ("other sources", unseen),
        ("– new sources", new),
        ("– new sources, by name and month alone", named_figures()[0]),
        ("– llm-foundry and torchtitan, each left out", again),
        *(
            (f"– {kind}{' training' if kind == 'full' else ''}", [one for one in unseen if one.row.kind == kind])
            for kind in KINDS
        ),
    ]


def _hardly_waits(one: Figure) -> bool:
    """Whether the host needs less than `WAITING` of the step by the forecast."""
    run = one.row.run
    assert run is not None
    host = host_seconds(run, run.shape.layers) * run.grad_accum_steps
    return host < WAITING * forecast_speed(run).step_seconds


def by_source(figures: list[Figure]) -> dict[str, list[Figure]]:
    names = dict.fromkeys(one.row.source for one in figures)
    return {name: [one for one in figures if one.row.source == name] for name in names}


def report(rows: list[Published], unseen: list[Figure], held: dict[str, Any] | None) -> str:
    """errors.md."""
    lines = [
        "# The forecast where nobody tuned it",
        "",
        "Made by `benchmarks/plan_errors.py`; the sources are in [sources.json](sources.json).",
        "",
        *HEAD,
        *(line(name, some) for name, some in groups(unseen)),
        *([held["line"]] if held else []),
        "",
        "## By source",
        "",
        "A star: rows with which an efficiency was chosen, forecast with what it would be without them: "
        + "; ".join(f"{one.source} on {', '.join(one.gpus)}: {one.because}" for one in WITHOUT)
        + ".",
        "",
        *HEAD,
        *(line(name, some) for name, some in by_source(unseen + left_out()).items()),
        "",
        *first_forecasts(),
        "## Off by more than a quarter",
        "",
        "| source | run | what | published | forecast | error | not known |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in sorted(unseen, key=lambda each: -abs(each.error)):
        if abs(one.error) > UNEXPLAINED:
            unknown = "; ".join(filter(None, [one.row.unknown, ", ".join(one.row.unsaid)]))
            lines.append(
                f"| {one.row.source} | {one.row.label} | {one.what} | {one.published:,.1f} | {one.forecast:,.1f} | "
                f"{one.error:+.0%} | {unknown} |"
            )
    skipped = [(row, ", ".join(row.unsaid)) for row in rows if row.run is None]
    skipped += [(row, f"speed only: {row.not_counted}") for row in rows if row.not_counted]
    skipped += [(row, f"memory only: {row.memory_not_counted}") for row in rows if row.memory_not_counted]
    if skipped:
        counted = line("new sources, all counted", compare(rows, all_counted=True))
        lines += ["", "## Not counted", "", "Which figures are not counted was decided with their errors in view. "]
        lines[-1] += "With them, and without, on the new sources:"
        lines += ["", *HEAD, counted, line("new sources", unseen)]
        lines += ["", "| source | run | because of |", "| --- | --- | --- |"]
        lines += [f"| {row.source} | {row.label} | {because} |" for row, because in skipped]
    return "\n".join(lines) + "\n"


def first_forecasts() -> list[str]:
    """The tables of `first.json`: sources as they were forecast before anything was corrected with them in view."""
    lines = ["## Forecast first, corrected afterwards", ""]
    for name, found in json.loads((FOLDER / "first.json").read_text()).items():
        lines += [
            f"{name.capitalize()}: sources by the forecast that had not seen them ([first.json](first.json)):",
            "",
            *HEAD,
            *(f"| {' | '.join([source, *row])} |" for source, row in found["sources"].items()),
            f"| {' | '.join(['all of them', *found['all']])} |",
            "",
        ]
    return lines


def write(rows: list[Published], unseen: list[Figure]) -> None:
    """The report, and the tables in the documents."""
    kept = FOLDER / "held_out.json"
    held = json.loads(kept.read_text()) if kept.is_file() else None
    (FOLDER / "errors.md").write_text(report(rows, unseen, held))
    summary = {name: cells(some) for name, some in groups(unseen)}
    (FOLDER / "errors.json").write_text(json.dumps(summary, indent=1) + "\n")
    table = [*HEAD, *(line(name, some) for name, some in groups(unseen)), *([held["line"]] if held else [])]
    _replace_table(ROOT / "docs" / "plan-accuracy.md", BEGIN, table)
    _replace_table(ROOT / "docs" / "plan-accuracy.md", BEGIN_UNSEEN, unseen_sets(held))


def unseen_sets(held: dict[str, Any] | None) -> list[str]:
    """A line per set of sources, by the forecast that had not seen them: those of `first.json`, and the last one."""
    lines = [HEAD[0].replace("| rows |", "| set | sources |"), HEAD[1].replace("| --- |", "| --- | --- |", 1)]
    for name, found in json.loads((FOLDER / "first.json").read_text()).items():
        lines.append(f"| {' | '.join([name, str(len(found['sources'])), *found['all']])} |")
    if held:
        lines.append(held["line"].replace("** |", f"** | {len(held['sources'])} |", 1))
    return lines


def _replace_table(path: Path, begin: str, table: list[str]) -> None:
    text = path.read_text()
    start = text.index(begin) + len(begin)
    end = text.index(END, start)
    path.write_text(text[:start] + "\n" + "\n".join(table) + "\n" + text[end:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Three errors of the forecast.")
    parser.add_argument("--held-out", action="store_true", help="the sources that were kept aside; once, at the end")
    held_out = parser.parse_args().held_out
    rows = read_published(held_out=held_out)
    figures = compare(rows)
    if held_out:
        found = {"line": line("**sources held out**", figures)}
        found["sources"] = {name: cells(some) for name, some in by_source(figures).items()}
        found["kinds"] = {kind: cells([one for one in figures if one.row.kind == kind]) for kind in KINDS}
        found["errors"] = [[one.row.source, one.row.kind, one.what, round(one.error, 4)] for one in figures]
        (FOLDER / "held_out.json").write_text(json.dumps(found, indent=1) + "\n")
        print(found["line"])
        return
    add_together()
    write(rows, figures)
    for name, some in groups(figures):
        print(line(name, some))


if __name__ == "__main__":
    main()
