"""The jobs of a run: which ones a scheduler was given, and what it says of them."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.config.run import RunDirectory
from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class JobRecord:
    """A job that was submitted."""

    scheduler: str
    job: str  # its ID
    submitted: float  # seconds since 1970


@dataclass(frozen=True)
class JobState:
    """What a scheduler says of a job."""

    state: str  # pending, running, stopping, finished, failed, cancelled
    detail: str = ""  # why it waits or has ended, in the scheduler's words
    nodes: str = ""

    @property
    def active(self) -> bool:
        return self.state in ("pending", "running", "stopping")


def write_record(run: Path, record: JobRecord) -> None:
    with RunDirectory(run).jobs.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_records(run: Path) -> list[JobRecord]:
    """The jobs of a run, oldest first; none for a run that was started without a scheduler."""
    file = RunDirectory(run).jobs
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserMistake(f"{file} cannot be read: {error.strerror}.") from None
    return [record for line in lines if (record := _read(line)) is not None]


def _read(line: str) -> JobRecord | None:
    try:
        found = json.loads(line)
        return JobRecord(str(found["scheduler"]), str(found["job"]), float(found["submitted"]))
    except (ValueError, KeyError, TypeError):  # half written
        return None
