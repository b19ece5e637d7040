"""Runs as jobs: submit them to a scheduler, see how they are, end them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.api.arguments import check_choice
from shoal.api.training import AnyConfig, read
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.launch.cluster.schedulers import Submitted
    from shoal.launch.status import RunStatus
    from shoal.observe.run_view import RunView


def submit(
    config: AnyConfig,
    *,
    to: str = "slurm",
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    anyway: bool = False,
) -> Submitted:
    """Submit a run to a scheduler. `config` is as in `train`; `overwrite` replaces the existing run of this name. With
    `dry_run`, or if it does not fit by the forecast and `anyway` is not set, the job is only rendered, and the result
    has no job ID."""
    from shoal.launch.cluster.schedulers import submit

    return submit(read(config), to=to, resume=resume, overwrite=overwrite, dry_run=dry_run, anyway=anyway)


def status(run: Path | str, *, runs: Path | str = "runs") -> RunStatus:
    """How a run is; `run` is its folder, or its name in `runs`."""
    from shoal.launch.status import find_run, status_of

    return status_of(find_run(str(run), user_path(runs, "--runs")))


def status_of_all(runs: Path | str = "runs") -> list[RunStatus]:
    """How all runs in a folder are, by name."""
    from shoal.launch.status import run_folders, status_of_each

    return status_of_each(run_folders(user_path(runs, "--runs")))


def view(run: Path | str, *, runs: Path | str = "runs") -> RunView:
    """Metrics and events of a run, from its files; `refresh` reads what was added."""
    from shoal.launch.status import find_run
    from shoal.observe.run_view import RunView

    return RunView(find_run(str(run), user_path(runs, "--runs")))


def logs(run: Path | str, *, rank: int | None = None, follow: bool = False, runs: Path | str = "runs") -> Iterator[str]:
    """The lines that a rank of a run has printed; with `follow`, until the run has ended."""
    from shoal.launch.logs import log_file, read_log
    from shoal.launch.status import find_run, status_of

    folder = find_run(str(run), user_path(runs, "--runs"))
    return read_log(log_file(folder, rank), follow=follow, status=lambda: status_of(folder))


def log_records(
    run: Path | str, *, rank: int | None = None, level: str = "debug", follow: bool = False, runs: Path | str = "runs"
) -> Iterator[dict[str, Any]]:
    """The log records of a run (`time, level, rank, host, logger, message`), of all its processes or of one rank."""
    from shoal.launch.logs import read_log_records
    from shoal.launch.status import find_run, status_of
    from shoal.observe.logs import LEVELS

    check_choice("level", level, LEVELS)
    folder = find_run(str(run), user_path(runs, "--runs"))
    return read_log_records(folder, rank=rank, level=level, follow=follow, active=lambda: status_of(folder).active)


def cancel(run: Path | str, *, runs: Path | str = "runs") -> RunStatus:
    """End a run; returns how it was. One that trains finishes its step and saves a checkpoint."""
    from shoal.launch.status import cancel_run, find_run

    return cancel_run(find_run(str(run), user_path(runs, "--runs")))
