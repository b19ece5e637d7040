"""`events.jsonl`: what happens in a run besides its steps: starts, saves, warnings, faults, restarts, its end.

One object per line, append-only, written by rank 0 and by the launcher. Docs: docs/observe.md.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.observe.metrics import ends_within_a_line, last_line, read_lines

EVENTS = "events.jsonl"
START, SAVE, WARNING, FAULT, STOP, RESTART, SAMPLE, END = (
    "start",
    "save",
    "warning",
    "fault",
    "stop",
    "restart",
    "sample",
    "end",
)


class EventLog:
    """Appends events to a run's `events.jsonl`. A disk that cannot be written is ignored: no run depends on it."""

    def __init__(self, run: Path, attempt: int = 0, step: int = 0) -> None:
        self.path = run / EVENTS
        self.attempt = attempt
        self.step = step  # of events that happen after it

    def write(self, event: str, *, when: float | None = None, step: int | None = None, **fields: Any) -> None:
        found = {
            "time": round(time.time() if when is None else when, 3),
            "event": event,
            "attempt": self.attempt,
            "step": self.step if step is None else step,
            **fields,
        }
        text = json.dumps(found) + "\n"
        with suppress(OSError):
            # Opened for each event, of which there are few: both the launcher and rank 0 append.
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(descriptor, (("\n" if ends_within_a_line(self.path) else "") + text).encode())
            finally:
                os.close(descriptor)


def launcher_events(run: Path) -> EventLog:
    """The event log for the launcher, at the attempt and step that the run's files tell."""
    event, metrics = last_line(run / EVENTS), last_line(run / "metrics.jsonl")
    attempts = [one["attempt"] for one in (event, metrics) if isinstance(one.get("attempt"), int)]
    steps = [one["step"] for one in (event, metrics) if isinstance(one.get("step"), int)]
    return EventLog(run, max(attempts, default=0), max(steps, default=0))


def read_events(run: Path) -> list[dict[str, Any]]:
    """The complete events of a run, in the order in which they were written; empty if there are none."""
    try:
        return [one for one in read_lines(run / EVENTS) if isinstance(one.get("event"), str)]
    except OSError:
        return []
