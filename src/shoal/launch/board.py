"""The folder in which the tasks of one launch tell each other what they do, beside that of the run.

Every task says that it is there and how its processes ended; the first one says what all of them do next.
"""

import json
import os
import shutil
import socket
import time
import uuid
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shoal.files import write_atomically
from shoal.launch.environment import Placement
from shoal.launch.rendezvous import DEFAULT_TIMEOUT, JOIN_TIMEOUT
from shoal.mistakes import RunFailed

POLL = 0.2
# Seconds for processes to fail by themselves, with a better message, after another has.
GRACE = 5.0
# Seconds for a task to say how its processes ended, after others have.
LATE = 30.0
# Seconds between two signs of life of a task, and after which one without is gone: a network disk may show them late.
SIGN, SILENT = 2.0, 90.0


@dataclass(frozen=True)
class Order:
    """What every task does next, as the first task says."""

    number: int
    tasks: list[str]  # for which it is: files of an earlier launch may be left
    restarts: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    end: str = ""  # "done", "mistake" or "failed": nothing more is started
    sentence: str = ""


class Board:
    """The folder of one launch, beside that of the run. Every file is written whole or not at all."""

    def __init__(self, run: Path, place: Placement) -> None:
        self.place = place
        self.folder = run.with_name(f".{run.name}.launch-{zlib.crc32(place.launch.encode()):08x}")
        self.own = uuid.uuid4().hex
        self.timeout = float(os.environ.get(JOIN_TIMEOUT, DEFAULT_TIMEOUT))
        self.number = -1
        self.tasks: list[str] = []
        self._next_sign = 0.0
        if place.rank == 0:  # what a launch that was killed has left
            shutil.rmtree(self.folder, ignore_errors=True)

    def round(self, number: int) -> Path:
        """The folder of the processes that were started by an order."""
        folder = self.folder / f"round-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def announce(self) -> None:
        """This task is there."""
        file = self.folder / f"task-{self.place.rank}"
        if not file.exists():
            with suppress(OSError):  # the first task may be removing what was left
                self.folder.mkdir(parents=True, exist_ok=True)
                write_atomically(file, json.dumps({"task": self.own, "host": socket.gethostname()}))

    def gather(self) -> None:
        """On the first task: wait until every task is there."""
        deadline = time.monotonic() + self.timeout
        while True:
            self.announce()
            there = {number: read(self.folder / f"task-{number}") for number in range(self.place.world_size)}
            missing = [number for number, found in there.items() if not found]
            if not missing:
                self.tasks = [str(found["task"]) for found in there.values()]
                return
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"Waited {self.timeout:.0f} s, but of {self.place.world_size} tasks that {self.place.started_by} "
                    f"started, {', '.join(map(str, missing))} did not appear in {self.folder}; do all nodes share it?"
                )
            time.sleep(POLL)

    def order(self, **what: Any) -> Order:
        """On the first task."""
        self.number += 1
        order = Order(self.number, self.tasks, **what)
        self.round(order.number)
        write_atomically(self.folder / "order", json.dumps(asdict(order)))
        return order

    def next_order(self, within: float) -> Order:
        """On the others: the order after the last one."""
        deadline = time.monotonic() + within
        while True:
            self.announce()
            found = read(self.folder / "order")
            if found and self.own in found["tasks"] and found["number"] > self.number:
                self.number = found["number"]
                return Order(**found)
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"Task {self.place.rank} on {socket.gethostname()} waited {within:.0f} s for the first task, which "
                    f"leaves its orders in {self.folder}; it has ended, or the nodes do not share that folder."
                )
            time.sleep(POLL)

    def end(self, how: str, sentence: str) -> None:
        """On the first task: tell those that are there, and wait a moment for others."""
        with suppress(OSError, RunFailed):
            self.timeout = min(self.timeout, LATE)
            self.gather()
            self.order(end=how, sentence=sentence)

    def report(self, number: int, ended: Mapping[int, int]) -> None:
        """How the processes of this task ended that ended by themselves: rank → status."""
        what = {"host": socket.gethostname(), "ended": ended}
        with suppress(OSError):
            write_atomically(self.round(number) / f"ended-{self.place.rank}", json.dumps(what))

    def reports(self, number: int) -> dict[int, dict[str, Any]]:
        found = {task: read(self.round(number) / f"ended-{task}") for task in range(self.place.world_size)}
        return {task: one for task, one in found.items() if one}

    def show_life(self) -> None:
        if time.monotonic() > self._next_sign:
            self._next_sign = time.monotonic() + SIGN
            with suppress(OSError):
                (self.folder / f"alive-{self.place.rank}").touch()

    def silent(self) -> set[int]:
        """The tasks that have shown no life for long, by the clock of the disk."""
        when: dict[int, float] = {}
        for task in range(self.place.world_size):
            with suppress(OSError):
                when[task] = (self.folder / f"alive-{task}").stat().st_mtime
        now = when.get(self.place.rank, 0.0)
        return {task for task, last in when.items() if now - last > SILENT}

    def close(self) -> None:
        """On the first task: remove everything, once the others have read the last order."""
        deadline = time.monotonic() + GRACE
        while time.monotonic() < deadline and len(list(self.folder.glob("read-*"))) < self.place.world_size - 1:
            time.sleep(POLL)
        shutil.rmtree(self.folder, ignore_errors=True)


def read(file: Path) -> dict[str, Any]:
    """The content of a file; empty if it is not there."""
    try:
        found: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found


def first_report(folder: Path, kind: str) -> str:
    """What the lowest rank that reported this has said."""
    for file in sorted(folder.glob(f"{kind}-*")):
        return file.read_text()
    return ""
