"""The forecast of runs that were just measured, kept before anything is corrected with them.

    python benchmarks/plan_first.py NAME FILE [FILE ...] [--from LINE] [--dry-run]

FILEs have the rows of `benchmarks/gpu/drawn_*.py`. Their errors become the set NAME of `plan/published/first.json`, as
the command is asked, and if the rows know their host's speed, the set `NAME, with the speed of their host` beside it.
`--from`: rows from this line of each FILE on, the first being 1. Prints every error; `--dry-run` writes nothing.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from plan_errors import KINDS, by_source, cells
from plan_published import FOLDER, Figure, compare, read_lines

HOST = "host_block_ms"


def main() -> None:
    parser = argparse.ArgumentParser(description="The forecast of runs that were just measured.")
    parser.add_argument("name")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--from", dest="first", type=int, default=1, metavar="LINE")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args()
    lines = [json.loads(line) for file in args.files for line in file.read_text().splitlines()[args.first - 1 :]]
    figures = compare(read_lines([{key: one[key] for key in one if key != HOST} for one in lines]))
    sets = {args.name: summary(figures)}
    if any(HOST in one for one in lines):
        known = compare(read_lines(lines))
        sets[f"{args.name}, with the speed of their host"] = summary(known)
        figures = known
    for one in figures:
        print(f"{one.error:+7.1%} {one.what:6} {one.published:10,.2f} {one.forecast:10,.2f}  {one.row.label}")
    for name, found in sets.items():
        print(name, found["all"])
    if not args.dry_run:
        path = FOLDER / "first.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **sets}, indent=1) + "\n")


def summary(figures: list[Figure]) -> dict[str, Any]:
    """What `first.json` has of a set."""
    return {
        "sources": {name: cells(some) for name, some in by_source(figures).items()},
        "kinds": {kind: cells([one for one in figures if one.row.kind == kind]) for kind in KINDS},
        "all": cells(figures),
        "errors": [[one.row.source, one.row.kind, one.what, round(one.error, 4)] for one in figures],
    }


if __name__ == "__main__":
    main()
