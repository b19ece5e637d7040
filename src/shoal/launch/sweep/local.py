"""Run members on this machine, one after another, each in a process of its own: `shoal train`."""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from shoal.launch.sweep.members import Base
from shoal.launch.sweep.results import last_sentence
from shoal.launch.sweep.state import Entry, Sweep
from shoal.resilience.signals import STOP_SIGNALS

STOPPED_EARLY = 75
_PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG
_LOOK_EVERY = 0.2  # seconds

# Called while a member runs; True: it is not worth continuing.
Prune = Callable[[Entry], bool]


def train_command(base: Base, sweep: Sweep, entry: Entry) -> list[str]:
    """The command that trains a member, or continues it."""
    own = [*base.fixed, *entry.member.overrides, f"name={entry.name}"]
    where = ["--runs", str(sweep.folder), "--resume", "auto"]
    return [sys.executable, "-m", "shoal", "train", str(base.file), *own, *where]


@dataclass
class Stopping:
    """The signal that asked the sweep to stop, if one has."""

    signal: int | None = None
    child: subprocess.Popen[bytes] | None = None

    def receive(self, number: int, _: FrameType | None) -> None:
        self.signal = number
        self.forward()

    def forward(self) -> None:
        """The member finishes its step and saves. Ctrl-C has reached it already, which counts as the same request."""
        if self.signal is not None and self.child is not None and self.child.poll() is None:
            self.child.send_signal(self.signal)


@contextmanager
def stopping() -> Iterator[Stopping]:
    """Signals are passed on to the member that runs, and no other is started after it."""
    asked = Stopping()
    before = [(number, signal.signal(number, asked.receive)) for number in STOP_SIGNALS]
    try:
        yield asked
    finally:
        for number, handler in before:
            signal.signal(number, handler)


def run_member(base: Base, sweep: Sweep, entry: Entry, asked: Stopping, *, prune: Prune = lambda _: False) -> Entry:
    """Train a member to its end, until a signal, or until it is pruned; returns its new entry."""
    entry = sweep.update(entry, state="running", attempts=entry.attempts + 1, error=None)
    began, pruned = time.monotonic(), False
    with sweep.log_of(entry).open("ab") as log:
        child = _start(train_command(base, sweep, entry), log.fileno())
        asked.child = child
        asked.forward()  # a signal that came before
        try:
            while (status := _ended(child)) is None:
                if not pruned and asked.signal is None and prune(entry):
                    pruned = True
                    child.send_signal(signal.SIGTERM)
        finally:
            asked.child = None
            if child.poll() is None:  # an error of ours
                child.terminate()
                child.wait()
    seconds = round(entry.seconds + time.monotonic() - began, 1)
    if status == 0:
        return sweep.update(entry, state="done", seconds=seconds)
    if pruned and status == STOPPED_EARLY:
        return sweep.update(entry, state="pruned", seconds=seconds)
    if status == STOPPED_EARLY or asked.signal is not None:
        return sweep.update(entry, state="stopped", seconds=seconds)
    how = f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"it ended with status {status}"
    reason = last_sentence(sweep.log_of(entry)) if status > 0 else None
    return sweep.update(entry, state="failed", seconds=seconds, error=reason or f"{how}; see {sweep.log_of(entry)}")


def _start(command: Sequence[str], log: int) -> "subprocess.Popen[bytes]":
    prctl = getattr(ctypes.CDLL(None), "prctl", None)

    def saves_if_the_sweep_dies() -> None:
        if prctl is not None:
            prctl(_PARENT_DEATH, signal.SIGTERM)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=saves_if_the_sweep_dies,
    )


def _ended(child: "subprocess.Popen[bytes]") -> int | None:
    try:
        return child.wait(_LOOK_EVERY)
    except subprocess.TimeoutExpired:
        return None
