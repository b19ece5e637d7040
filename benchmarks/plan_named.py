"""The forecast as the command gives it: published runs by `shoal plan --like NAME@YEAR-MONTH` and keys of a config.

python benchmarks/plan_named.py

`plan_published.py` forecasts a run with all that its source says about its system (`nearest/`). Somebody who asks the
command says less: the name that `--like` has for it, and the month. Runs that a config cannot describe are left out.
"""

import argparse
import json
from collections import Counter
from typing import Any

from nearest.names import name_of
from plan_published import FOLDER, Figure, Published, compare, print_errors, read_row, rows_of, year_and_month
from published_config import config_of

from shoal import api
from shoal.mistakes import UserMistake
from shoal.plan.run import Run


def named_figures(*, held_out: bool = False) -> tuple[list[Figure], Counter[str]]:
    """The figures of the runs that the command can be asked for, and why it could not be asked for the others."""
    models = json.loads((FOLDER / "models.json").read_text())
    rows: list[Published] = []
    refused: Counter[str] = Counter()
    for line in rows_of(held_out=held_out):
        row = read_row(line, models)
        if row.run is None:
            continue
        try:
            rows.append(row.with_run(asked(line, models)))
        except UserMistake as mistake:
            refused[str(mistake).splitlines()[0]] += 1
    return compare(rows), refused


def asked(line: dict[str, Any], models: dict[str, Any]) -> Run:
    """The run that the command forecasts for a row; a UserMistake if it cannot be asked."""
    values = config_of(line, models)
    if values is None:
        raise UserMistake("A config cannot say what this run does.")
    year, month = year_and_month(line)
    return api.plan(_nested(values), system=f"{name_of(line['system'])}@{year}-{month:02}").choice.run


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """Values by dotted key as blocks of a config."""
    mapping: dict[str, Any] = {}
    for key, value in values.items():
        *blocks, last = key.split(".")
        inner = mapping
        for block in blocks:
            inner = inner.setdefault(block, {})
        inner[last] = value
    return mapping


def main() -> None:
    argparse.ArgumentParser(description="The forecast's error by the names of the command.").parse_args()
    figures, refused = named_figures()
    print_errors("all", figures)
    for kind in ("full", "LoRA", "QLoRA"):
        print_errors(kind, [one for one in figures if one.row.kind == kind])
    for name in sorted({name_of(one.row.label.split(" ")[0]) for one in figures}):
        print_errors(name, [one for one in figures if name_of(one.row.label.split(" ")[0]) == name])
    for sentence, number in refused.most_common():
        print(f"{number} runs: {sentence}")


if __name__ == "__main__":
    main()
