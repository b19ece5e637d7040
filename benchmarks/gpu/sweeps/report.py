"""The results: read, merged, summarized and printed as a Markdown table."""

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sweeps.forecast import FIGURES, Compared, compare, outside
from sweeps.rows import ROWS

Records = dict[str, dict[str, Any]]
TITLES = {"allocated_gib": "allocated GiB", "reserved_gib": "reserved GiB", "tokens_per_second": "tokens/s"}


def read_records(path: Path) -> Records:
    """The records of a sweep.json, or of the JSON lines that a call writes as it goes: of a row, the best one."""
    text = path.read_text()
    lines = text.splitlines() if path.suffix == ".jsonl" else json.loads(text)["rows"]
    found: Records = {}
    for line in lines:
        add(found, json.loads(line) if isinstance(line, str) else line)
    return found


def add(records: Records, new: dict[str, Any]) -> None:
    """A failure does not replace a measurement."""
    old = records.get(new["row"])
    if old is None or new["status"] == "measured" or old["status"] != "measured":
        records[new["row"]] = new


def write_records(path: Path, records: Records) -> None:
    """Write atomically, in the order of the table."""
    names = {row.name: index for index, row in enumerate(ROWS)}
    rows = sorted(records.values(), key=lambda record: names.get(record["row"], len(names)))
    content = {"summary": summarize(compare(rows), compare(rows, recorded=True)), "rows": rows}
    new = path.with_suffix(".new")
    new.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    new.replace(path)


def summarize(compared: list[Compared], recorded: list[Compared]) -> dict[str, Any]:
    """Median and worst error of every figure: of all rows, and of those that are held out as they were forecast when
    they were measured, since constants may have changed because of them."""
    found: dict[str, Any] = {}
    held_out = [one for one in recorded if one.held_out]
    for title, some in (("all rows", compared), ("held out, as recorded", held_out)):
        for figure in FIGURES:
            errors = [one for one in some if one.figure == figure]
            if errors:
                worst = max(errors, key=lambda one: abs(one.error))
                found[f"{TITLES[figure]}, {title}"] = {
                    "rows": len(errors),
                    "median": round(statistics.median(abs(one.error) for one in errors), 4),
                    "bias": round(statistics.median(one.error for one in errors), 4),
                    "worst": round(worst.error, 4),
                    "worst_row": worst.row,
                }
    return found


def markdown(records: Records, *, recorded: bool = False) -> str:
    """Summary and table."""
    before = compare(list(records.values()), recorded=True)
    compared = before if recorded else compare(list(records.values()))
    return "\n".join([*_summary_lines(compared, before), *_row_lines(records, compared), *_failures(records)]) + "\n"


def _summary_lines(compared: list[Compared], recorded: list[Compared]) -> Iterator[str]:
    yield "| measured / forecast − 1 | rows | median | bias | worst | worst row |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, one in summarize(compared, recorded).items():
        yield (
            f"| {name} | {one['rows']} | {one['median']:.1%} | {one['bias']:+.1%} | {one['worst']:+.1%} | "
            f"{one['worst_row']} |"
        )
    missed = outside(compared)
    yield ""
    yield f"{len(missed)} of {len(compared)} figures are outside 5% of memory or 10% of speed."


def _row_lines(records: Records, compared: list[Compared]) -> Iterator[str]:
    by_row: dict[str, dict[str, Compared]] = {}
    for one in compared:
        by_row.setdefault(one.row, {})[one.figure] = one
    yield ""
    yield f"| run | {' | '.join(f'{TITLES[figure]}, forecast | measured | ratio' for figure in FIGURES)} |"
    yield f"| --- |{' --- | --- | --- |' * len(FIGURES)}"
    for name, figures in by_row.items():
        marked = f"{name} (held out)" if records[name]["held_out"] else name
        cells = [cell for figure in FIGURES for cell in _cells(figures.get(figure))]
        yield f"| {marked} | {' | '.join(cells)} |"


def _cells(one: Compared | None) -> list[str]:
    if one is None:
        return ["–"] * 3
    digits = 0 if one.figure == "tokens_per_second" else 2
    ratio = f"{one.measured / one.forecast:.3f}"
    return [
        f"{one.forecast:,.{digits}f}",
        f"{one.measured:,.{digits}f}",
        ratio if one.within(0.05, 0.10) else f"**{ratio}**",
    ]


def _failures(records: Records) -> Iterator[str]:
    failed = [record for record in records.values() if record["status"] != "measured"]
    if failed:
        yield ""
        yield "Not measured:"
        yield from (f"- {record['row']}: {record['status'][:200]}" for record in failed)
