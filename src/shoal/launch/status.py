"""How runs are: what their folders say, and the scheduler that runs them."""

import json
import os
import signal
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.checkpoint.store import list_complete
from shoal.config.lock import holder
from shoal.config.replaced import is_run
from shoal.config.run import RunDirectory
from shoal.launch.cluster.jobs import JobRecord, JobState, read_records
from shoal.launch.cluster.schedulers import find_scheduler
from shoal.launch.cluster.submission import stopped_file
from shoal.launch.outcome import Outcome, read_outcome
from shoal.mistakes import UserMistake, suggestion
from shoal.observe.metrics import read_lines

DEFAULT_RUNS = Path("runs")
_SAID = b"shoal: "  # begins the sentence of a mistake or a failure
_TAIL = 100_000  # bytes of a log that are searched for it


@dataclass(frozen=True)
class RunStatus:
    """How a run is."""

    name: str
    run: str
    # pending, running, stopping; finished, stopped (with a checkpoint), failed, cancelled; died: it was killed; new
    state: str
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    checkpoint: int | None = None  # step of the newest complete one
    scheduler: str | None = None
    job: str | None = None
    nodes: str = ""
    detail: str = ""  # why it waits, or why it failed
    process: int | None = None  # of a run without a scheduler, while it runs
    host: str | None = None

    @property
    def active(self) -> bool:
        return self.state in ("pending", "running", "stopping")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find_run(given: str, runs: Path = DEFAULT_RUNS) -> Path:
    """The folder of a run that is named by its folder or by its name in `runs`."""
    for path in (Path(given).expanduser(), runs / given):
        with suppress(OSError, ValueError):
            if is_run(path):
                return path
    names = [path.name for path in run_folders(runs)]
    meant = suggestion(given, names) or (" shoal status lists those that there are." if names else "")
    raise UserMistake(f"There is no run {given}, neither as a folder nor in {runs}.{meant}")


def run_folders(runs: Path) -> list[Path]:
    """The folders of the runs in `runs`, by name."""
    try:
        return sorted(path for path in runs.iterdir() if not path.name.startswith(".") and is_run(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UserMistake(f"{runs} cannot be read: {error.strerror}.") from None


def status_of(run: Path) -> RunStatus:
    """How the run in this folder is."""
    return status_of_each([run])[0]


def status_of_each(runs: list[Path]) -> list[RunStatus]:
    """How the runs in these folders are. Each scheduler is asked once, for all of them."""
    jobs = {run: records[-1] for run in runs if (records := read_records(run))}
    states: dict[JobRecord, JobState] = {}
    for scheduler in {record.scheduler for record in jobs.values()}:
        asked = [record for record in jobs.values() if record.scheduler == scheduler]
        answers = find_scheduler(scheduler).states([record.job for record in asked])
        states |= {record: answers[record.job] for record in asked if record.job in answers}
    return [_status(run, job := jobs.get(run), None if job is None else states.get(job)) for run in runs]


def _status(run: Path, record: JobRecord | None, job: JobState | None) -> RunStatus:
    directory = RunDirectory(run)
    status = _progress(RunStatus(Path(os.path.abspath(run)).name, str(run), "new"), directory)
    held, outcome = holder(directory.lock), read_outcome(run)
    if record is not None:
        status = replace(status, scheduler=record.scheduler, job=record.job)
        if outcome is not None and outcome.ended < record.submitted:
            outcome = None  # of an earlier job
    if job is not None and (job.active or held is None):
        return _of_job(replace(status, state=job.state, detail=job.detail, nodes=job.nodes), run, outcome)
    if held is not None:
        return replace(status, state="running", process=held.process or None, host=held.host or None)
    if outcome is not None:
        return replace(status, state=outcome.state, detail=outcome.why if outcome.state == "failed" else "")
    if record is not None:
        return replace(status, state="unknown", detail="the scheduler does not know the job any more")
    return status if status.step is None else replace(status, state="died", detail="it was killed")


def cancel_run(run: Path) -> RunStatus:
    """Ask a run to stop, or take it out of the queue; returns how it was. One that trains saves a checkpoint."""
    status = status_of(run)
    if not status.active:
        raise UserMistake(f"{status.name} does not run and waits for nothing: it is {status.state}.")
    if status.process is None and status.job is not None and status.scheduler is not None:
        find_scheduler(status.scheduler).cancel(status.job)
    elif status.process is None:
        raise UserMistake(f"{status.name} is running, but its lock does not say in which process; end it by hand.")
    elif status.host != socket.gethostname():
        raise UserMistake(f"{status.name} is running on {status.host}; run shoal cancel there.")
    else:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(status.process, signal.SIGTERM)
    return status


def _of_job(status: RunStatus, run: Path, outcome: Outcome | None) -> RunStatus:
    """With what the run itself has said, if its job has failed."""
    if status.state != "failed":
        return status
    if stopped_file(run).exists():
        return replace(status, state="stopped", detail="")  # a job that is not requeued ends with status 75
    said = outcome.why if outcome is not None and outcome.state == "failed" else _last_sentence(run, status.job)
    words = [word for word in (status.detail if status.detail != "failed" or not said else "", said) if word]
    return replace(status, detail=": ".join(words))


def _progress(status: RunStatus, run: RunDirectory) -> RunStatus:
    """With what the run has logged and saved."""
    steps = None
    with suppress(OSError, ValueError, AttributeError):
        steps = json.loads(run.plan.read_text()).get("steps")
    line: dict[str, Any] = {}
    with suppress(OSError):
        line = next((one for one in reversed(read_lines(run.metrics)) if "loss" in one), {})
    saved = list_complete(run.checkpoints)
    return replace(
        status,
        step=line.get("step"),
        steps=steps if isinstance(steps, int) else None,
        loss=line.get("loss"),
        tokens_per_second=line.get("tokens_per_second"),
        checkpoint=saved[-1].step if saved else None,
    )


def _last_sentence(run: Path, job: str | None) -> str:
    """The last sentence that shoal has said in the log of a job."""
    with suppress(OSError), (run / "logs" / f"slurm-{job}.out").open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        said = [line for line in file.read().splitlines() if line.startswith(_SAID)]
        return said[-1].removeprefix(_SAID).decode(errors="replace") if said else ""
    return ""
