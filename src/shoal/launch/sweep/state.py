"""sweep.json: the members of a sweep and how far each one is. It is written after every change, complete or not at
all, so that the same command continues after any end."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shoal.files import write_atomically
from shoal.launch.sweep.members import Member
from shoal.mistakes import UserMistake

FILE = "sweep.json"
FORMAT = 1

State = Literal["waiting", "running", "stopped", "submitted", "done", "pruned", "failed"]
# What is not started again.
ENDED: tuple[State, ...] = ("done", "pruned", "failed")


@dataclass(frozen=True)
class Entry:
    """A member and its state."""

    member: Member
    state: State = "waiting"
    attempts: int = 0
    seconds: float = 0.0  # of all attempts, in this process
    error: str | None = None  # why it failed, or was not submitted
    job: str | None = None  # of a scheduler

    @property
    def name(self) -> str:
        return self.member.name


@dataclass
class Sweep:
    """The folder of a sweep, and its members in the order in which they start."""

    folder: Path
    entries: list[Entry] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        return [entry.member for entry in self.entries]

    def run_of(self, entry: Entry) -> Path:
        return self.folder / entry.name

    def log_of(self, entry: Entry) -> Path:
        return self.folder / "logs" / f"{entry.name}.log"

    def add(self, members: Sequence[Member]) -> None:
        """Add the members that are new, and write the state."""
        known = {entry.name for entry in self.entries}
        self.entries += [Entry(member) for member in members if member.name not in known]
        self.write()

    def update(self, entry: Entry, **changes: Any) -> Entry:
        """Replace an entry, and write the state."""
        index = next(index for index, one in enumerate(self.entries) if one.name == entry.name)
        self.entries[index] = replace(self.entries[index], **changes)
        self.write()
        return self.entries[index]

    def write(self) -> None:
        try:
            (self.folder / "logs").mkdir(parents=True, exist_ok=True)
            members = [{**asdict(one.member), **_without_member(one)} for one in self.entries]
            write_atomically(self.folder / FILE, json.dumps({"format": FORMAT, "members": members}, indent=1))
        except OSError as error:
            raise UserMistake(f"{self.folder} cannot be written: {error.strerror}.") from None


def _without_member(entry: Entry) -> dict[str, Any]:
    return {key: value for key, value in asdict(entry).items() if key != "member"}


def read_sweep(folder: Path) -> Sweep:
    """The sweep in `folder`; without members if there is none yet."""
    path = folder / FILE
    if not path.is_file():
        if (folder / "config.yaml").exists():
            raise UserMistake(f"{folder} holds a run, not a sweep; give the sweep another --name.")
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise UserMistake(f"{folder} exists and is not a sweep; give the sweep another --name.")
        return Sweep(folder)
    try:
        found = json.loads(path.read_bytes())
        if found["format"] != FORMAT:
            raise UserMistake(f"{path} was written by another version of shoal; give the sweep another --name.")
        entries = [_entry(one) for one in found["members"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserMistake(f"{path} cannot be read ({type(error).__name__}); give the sweep another --name.") from None
    # The process that ran it is gone: this one holds the lock of the sweep.
    return Sweep(folder, [replace(one, state="stopped") if one.state == "running" else one for one in entries])


def _entry(found: dict[str, Any]) -> Entry:
    member = Member(str(found["name"]), tuple(map(str, found["overrides"])), str(found["digest"]))
    if found["state"] not in State.__args__:  # type: ignore[attr-defined]
        raise ValueError(found["state"])
    if "/" in member.name or member.name.startswith("."):  # it names a folder
        raise ValueError(member.name)
    return Entry(member, found["state"], found["attempts"], found["seconds"], found["error"], found["job"])
