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
from shoal.launch.jobs import JobState, read_records
from shoal.launch.outcome import read_outcome
from shoal.launch.schedulers import find_scheduler
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
    raise UserMistake(f"There is no run {given}, neither as a folder nor in {runs}.{suggestion(given, names)}")


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
    directory = RunDirectory(run)
    status = _progress(RunStatus(Path(os.path.abspath(run)).name, str(run), "new"), directory)
    outcome, held, records = read_outcome(run), holder(directory.lock), read_records(run)
    if records:
        last = records[-1]
        status = replace(status, scheduler=last.scheduler, job=last.job)
        job = find_scheduler(last.scheduler).states([last.job]).get(last.job)
        if job is not None and (job.active or held is None):
            return _of_job(status, job, run)
    if held is not None:
        return replace(status, state="running", process=held.process or None, host=held.host or None)
    if outcome is not None:
        return replace(status, state=outcome.state, detail=outcome.why if outcome.state == "failed" else "")
    if records:
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


def _of_job(status: RunStatus, job: JobState, run: Path) -> RunStatus:
    state, detail, outcome = job.state, job.detail, read_outcome(run)
    if state == "failed" and outcome is not None and outcome.state == "stopped":
        state, detail = "stopped", ""  # a job that is not requeued ends with status 75
    elif state == "failed":
        said = outcome.why if outcome is not None and outcome.state == "failed" else _last_sentence(run, status.job)
        detail = f"{detail}: {said}" if said and detail != "failed" else said or detail
    return replace(status, state=state, detail=detail, nodes=job.nodes)


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
