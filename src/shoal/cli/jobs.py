"""`shoal status`, `shoal logs` and `shoal cancel`: on the name or the folder of a run."""

from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.common import AsJson, print_json

if TYPE_CHECKING:
    from shoal.launch.status import RunStatus

Name = Annotated[str, typer.Argument(metavar="RUN", help="The run's name or folder.")]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="The folder of the runs.")]


class Level(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


COLUMNS = ("run", "state", "step", "loss", "tok/s", "saved", "job", "nodes")


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The run's name or folder; without it, all runs.")
    ] = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Show how runs are: waiting, running, finished, or failed and why; on a cluster and on this machine."""
    from shoal import api

    found = [api.status(run, runs=runs)] if run is not None else api.status_of_all(runs)
    if as_json:
        print_json(found[0].as_dict() if run is not None else {"runs": [one.as_dict() for one in found]})
    elif found:
        typer.echo(_table(found))
    else:
        typer.echo(f"There are no runs in {runs}.")


def logs(
    run: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    rank: Annotated[int | None, typer.Option("--rank", min=0, help="The rank; default: 0, and the job script.")] = None,
    level: Annotated[
        Level | None,
        typer.Option("--level", help="Log records of this level and above, of all ranks or of --rank, by time."),
    ] = None,
    runs: Runs = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """Print what a run has printed, or with --level its log records."""
    from shoal import api

    if level is not None:
        from shoal.launch.logs import record_text

        records = api.log_records(run, rank=rank, level=level.value, follow=follow and not as_json, runs=runs)
        if as_json:
            print_json({"run": run, "records": list(records)})
            return
        if not _print_all(record_text(one) for one in records):
            whose = f"{run} has" if rank is None else f"Rank {rank} of {run} has"
            typer.echo(f"{whose} no log record of level {level.value} or above.", err=True)
        return
    lines = api.logs(run, rank=rank, follow=follow and not as_json, runs=runs)
    if as_json:
        print_json({"run": run, "lines": list(lines)})
        return
    _print_all(lines)


def _print_all(lines: Iterable[str]) -> int:
    """Print the lines; return how many."""
    printed = 0
    try:
        for line in lines:
            typer.echo(line)
            printed += 1
    except KeyboardInterrupt:
        raise typer.Exit from None
    return printed


def cancel(run: Name, runs: Runs = Path("runs"), as_json: AsJson = False) -> None:
    """End a run: its job, or its processes on this machine. A run that trains saves a checkpoint first."""
    from shoal import api

    found = api.cancel(run, runs=runs)
    if as_json:
        print_json(found.as_dict())
        return
    what = f"job {found.job}" if found.process is None else f"process {found.process}"
    saves = "" if found.state == "pending" else "; it finishes its step and saves a checkpoint"
    typer.echo(f"{found.name}: {what} was asked to end{saves}.")


def _table(found: "list[RunStatus]") -> str:
    rows = [COLUMNS, *(_row(one) for one in found)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    lines = []
    for index, row in enumerate(rows):
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
        if index and found[index - 1].detail:
            lines.append(f"    {found[index - 1].detail.splitlines()[0]}")
    return "\n".join(lines)


def _row(one: "RunStatus") -> tuple[str, ...]:
    step = "–" if one.step is None else f"{one.step}/{one.steps or '?'}"
    return (
        one.name,
        one.state,
        step,
        "–" if one.loss is None else f"{one.loss:.4f}",
        "–" if one.tokens_per_second is None else f"{one.tokens_per_second:,.0f}",
        "–" if one.checkpoint is None else str(one.checkpoint),
        one.job or (f"pid {one.process}" if one.process else "–"),
        one.nodes or one.host or "",
    )
