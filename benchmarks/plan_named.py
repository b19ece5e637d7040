"""The forecast as the command gives it: published runs by `shoal plan --like NAME@YEAR-MONTH` and keys of a config.

python benchmarks/plan_named.py

`plan_published.py` forecasts a run with all that its source says about its system (`nearest/`). Somebody who asks the
command says less: the name that `--like` has for it, and the month. Runs that a config cannot describe are left out.
"""

import argparse
import json
from collections import Counter
from functools import cache

from nearest.names import name_of
from plan_published import FOLDER, Figure, Published, compare, print_errors, read_row, rows_of, year_and_month
from published_config import asked

from shoal.mistakes import UserMistake


@cache
def named_figures() -> tuple[list[Figure], Counter[str]]:
    """The figures of the runs that the command can be asked for, and why it could not be asked for the others."""
    models = json.loads((FOLDER / "models.json").read_text())
    rows: list[Published] = []
    refused: Counter[str] = Counter()
    for line in rows_of():
        row = read_row(line, models)
        if row.run is None:
            continue
        try:
            year, month = year_and_month(line)
            system = line["system"]
            if "@" not in system:
                system = f"{name_of(system, line['source'])}@{year}-{month:02}"
            rows.append(row.with_run(asked({**line, "traits": {}}, models, system)))
        except UserMistake as mistake:
            refused[str(mistake).splitlines()[0]] += 1
    return compare(rows), refused


def main() -> None:
    argparse.ArgumentParser(description="The forecast's error by the names of the command.").parse_args()
    figures, refused = named_figures()
    print_errors("all", figures)
    for kind in ("full", "LoRA", "QLoRA"):
        print_errors(kind, [one for one in figures if one.row.kind == kind])
    named = [(name_of(one.row.label.split(" ")[0], one.row.source), one) for one in figures]
    for name in sorted({name for name, _ in named}):
        print_errors(name, [one for other, one in named if other == name])
    for sentence, number in refused.most_common():
        print(f"{number} runs: {sentence}")


if __name__ == "__main__":
    main()
