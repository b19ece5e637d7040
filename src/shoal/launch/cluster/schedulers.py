"""The schedulers that a run can be submitted to, and `submit`, which is the same for all of them."""

import shlex
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from shoal.config.schema import Config
from shoal.launch.cluster.jobs import JobRecord, JobState, read_records, write_record
from shoal.launch.cluster.submission import Submission, check_run, forecast, prepare, undo_overwrite, write_run
from shoal.mistakes import UserMistake, suggestion
from shoal.plan.report import Plan

# A line per scheduler: the module has the functions of `Scheduler`, and is imported when it is used.
SCHEDULERS = {
    "slurm": "shoal.launch.cluster.slurm",
    "kubernetes": "shoal.launch.cluster.kubernetes",
    "skypilot": "shoal.launch.cluster.skypilot",
    "ray": "shoal.launch.cluster.ray",
}


class Scheduler(Protocol):
    """A module of `SCHEDULERS`."""

    FILE: str  # name of the rendered file in the run folder

    def settle(self, config: Config, *, dry_run: bool) -> Config:
        """`config` with `hardware.devices` and, if it is known here, `hardware.gpu`, checked against what there is."""
        ...

    def render(self, submission: Submission) -> str:
        """The file that is submitted."""
        ...

    def submit(self, submission: Submission, file: Path) -> str:
        """Submit the rendered `file` and return the ID of the job."""
        ...

    def states(self, jobs: list[str]) -> dict[str, JobState]:
        """The states of jobs by ID; without those that the scheduler no longer knows."""
        ...

    def cancel(self, job: str) -> None:
        """End a job and what it has started."""
        ...


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted, or would have been."""

    submission: Submission
    scheduler: str
    file: str
    text: str
    job: str | None  # None: not submitted
    plan: Plan | None  # None: it cannot be forecast here
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.plan is None or self.plan.fits

    def summary(self) -> str:
        """What was submitted, and the commands that come next."""
        one = self.submission
        name = one.name if one.run.parent == one.folder / "runs" else shlex.quote(str(one.run))
        return (
            f"job {self.job}: {one.nodes} {'node' if one.nodes == 1 else 'nodes'} × {one.devices} "
            f"{'device' if one.devices == 1 else 'devices'}, {self.file}\n"
            f"next: shoal status {name}, shoal logs -f {name}, shoal cancel {name}"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "run": str(self.submission.run),
            "scheduler": self.scheduler,
            "job": self.job,
            "file": self.file,
            "text": self.text,
            "nodes": self.submission.nodes,
            "devices": self.submission.devices,
            "command": list(self.submission.command),
            "plan": None if self.plan is None else self.plan.as_dict(),
            "notes": list(self.notes),
        }


def find_scheduler(name: str) -> Scheduler:
    if name not in SCHEDULERS:
        raise UserMistake(
            f"No scheduler is called {name}; the names are {', '.join(SCHEDULERS)}.{suggestion(name, SCHEDULERS)}"
        )
    return cast(Scheduler, import_module(SCHEDULERS[name]))


def submit(
    config: Config,
    *,
    to: str = "slurm",
    resume: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    anyway: bool = False,
) -> Submitted:
    """Forecast the run, render its job and submit it. A run that does not fit is not submitted, unless `anyway`: see
    `Submitted.fits` and `Submitted.job`."""
    scheduler = find_scheduler(to)
    check_run(config, resume=resume, overwrite=overwrite)
    settled = scheduler.settle(config, dry_run=dry_run)
    plan, notes = forecast(settled)
    submission = prepare(settled, plan)
    file = submission.run / scheduler.FILE
    text = scheduler.render(submission)
    job = None
    if not dry_run and (anyway or plan is None or plan.fits):
        check_no_job(submission.run)
        kept = config.hardware.model_copy(update={"devices": submission.devices})
        written = config.model_copy(update={"hardware": kept})
        write_run(written, submission, scheduler.FILE, text, overwrite=overwrite, say=notes.append)
        try:
            job = scheduler.submit(submission, file)
        except UserMistake:
            undo_overwrite(submission)
            raise
        write_record(submission.run, JobRecord(to, job, time.time()))
    return Submitted(submission, to, str(file), text, job, plan, tuple(notes))


def check_no_job(run: Path) -> None:
    """A UserMistake if a job of this run waits or runs."""
    for record in read_records(run)[-1:]:
        state = find_scheduler(record.scheduler).states([record.job]).get(record.job)
        if state is not None and state.active:
            raise UserMistake(
                f"{run.name} has job {record.job} already, which is {state.state}; end it with shoal cancel "
                f"{run.name}, or choose another name=…"
            )
