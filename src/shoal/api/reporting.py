"""Pages about runs, from their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.api.arguments import as_list
from shoal.files import write_atomically
from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Written:
    """A page about runs."""

    path: str
    runs: tuple[dict[str, Any], ...]  # their figures

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(runs: Sequence[Path | str], output: Path | str | None = None) -> Written:
    """Write a page about a run, or one that compares several; a run is its folder, or its name in `runs`.

    `output`: by default `report.html` in the folder of a single run, else in the current folder.
    """
    from shoal.launch.status import find_run
    from shoal.observe.report_page import REPORT, comparison, run_report
    from shoal.observe.results import results_of
    from shoal.observe.run_reader import RunReader
    from shoal.paths import user_path

    if not runs:
        raise UserMistake("No run is given; shoal report takes the folders of runs, such as runs/NAME.")
    folders = list(dict.fromkeys(find_run(str(run)) for run in as_list(runs)))
    records = [RunReader(folder).read() for folder in folders]
    path = (folders[0] if len(folders) == 1 else Path()) / REPORT if output is None else user_path(output, "--output")
    if path.is_dir():
        raise UserMistake(f"--output {path} is a folder; give the name of a file, such as {path / REPORT}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, run_report(records[0]) if len(records) == 1 else comparison(records))
    except OSError as error:
        raise UserMistake(f"{path} cannot be written: {error.strerror}.") from None
    found = (
        {"run": str(one.path), "state": one.state, "step": one.step, "steps": one.steps, **asdict(results_of(one))}
        for one in records
    )
    return Written(str(path), tuple(found))
