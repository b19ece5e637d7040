"""Log records of a run: JSON lines per process in `RUN/logs`, and what of them the terminal shows.

`shoal.observe.progress.Reporter` prints what rank 0 and the launcher say, and logs it here as well. Code that has
something to say on one rank alone uses `logging.getLogger("shoal.…")`: the terminal shows its warnings with the rank.
Warnings of rank 0 and of the launcher are also events of the run (`observe/events.py`).
"""

import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.events import WARNING, EventLog
from shoal.observe.metrics import ends_within_a_line

LOGGER = logging.getLogger("shoal")
# What is not asked for is not logged, and what nobody handles is not printed a second time by Python.
LOGGER.setLevel(logging.INFO)
LOGGER.addHandler(logging.NullHandler())
LOGGER.propagate = False

LEVELS = ("debug", "info", "warning", "error")
# Attributes of a record: the terminal has shown it; it is an event of the run.
PRINTED, EVENT = "shoal_printed", "shoal_event"
OWN_OUTPUT = 2  # standard error, which a rank other than 0 has redirected to a file
KEPT = 1000  # records before the run's folder exists


class RunLog(logging.Handler):
    """Writes records as JSON lines into the folder of a run, once that is this process's own; keeps them until then."""

    def __init__(self) -> None:
        super().__init__()
        self.events: EventLog | None = None  # of rank 0 and of the launcher
        self.rank: int | None = None  # None: the launcher
        self._host = socket.gethostname()
        self._kept: list[logging.LogRecord] = []
        self._file: int | None = None
        self._begin = ""  # a line break after a line that a full disk has cut

    def open(self, logs: Path, rank: int | None, events: EventLog | None) -> None:
        """Write what was kept, and all that follows. A disk that cannot be written is ignored."""
        self.rank, self.events = rank, events
        name = "launcher.jsonl" if rank is None else f"rank-{rank}.jsonl"
        with suppress(OSError):
            self._file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._begin = "\n" if ends_within_a_line(logs / name) else ""
        kept, self._kept = self._kept, []
        for record in kept:
            self.emit(record)

    @property
    def opened(self) -> bool:
        return self._file is not None

    def emit(self, record: logging.LogRecord) -> None:
        if self._file is None:
            if len(self._kept) < KEPT:
                self._kept.append(record)
            return
        line = f"{self._begin}{json.dumps(self.as_dict(record))}\n".encode()
        with suppress(OSError):
            self._begin = "\n" if os.write(self._file, line) < len(line) else ""
        ours = record.name == LOGGER.name or record.name.startswith(f"{LOGGER.name}.")
        if self.events is not None and ours and record.levelno >= logging.WARNING and getattr(record, EVENT, True):
            self.events.write(WARNING, when=record.created, text=record.getMessage())

    def as_dict(self, record: logging.LogRecord) -> dict[str, Any]:
        message = record.getMessage()
        if record.exc_info:
            message += "\n" + logging.Formatter().formatException(record.exc_info)
        return {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "rank": self.rank,
            "host": self._host,
            "logger": record.name,
            "message": message,
        }

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        super().close()


class Terminal(logging.Handler):
    """Shows the records that `Reporter` has not: on ranks other than 0 also warnings on the terminal of rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rank = 0
        self.shared: int | None = None  # the terminal, where this rank's own output goes to a file

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, PRINTED, False):
            return
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        text = f"{level}{record.getMessage()}\n"
        with suppress(OSError, ValueError):
            if self.shared is None:
                # Looked up here: a progress bar replaces it, to keep itself below what is printed.
                print(text, end="", file=sys.stderr, flush=True)
                return
            os.write(OWN_OUTPUT, text.encode())
            if record.levelno >= logging.WARNING:
                os.write(self.shared, f"rank {self.rank}: {text}".encode())

    def close(self) -> None:
        if self.shared is not None:
            os.close(self.shared)
            self.shared = None
        super().close()


@contextmanager
def logging_run(level: str) -> Iterator[None]:
    """Handle the records of this process, of `level` and above; other libraries' of warnings and above."""
    before = LOGGER.level
    log, terminal, root = RunLog(), Terminal(), logging.getLogger()
    others = [log] if root.handlers else [log, logging.lastResort]  # the latter prints only if there is no other
    LOGGER.setLevel(level.upper())
    for handler in (log, terminal):
        LOGGER.addHandler(handler)
    for other in others:
        assert other is not None
        root.addHandler(other)
    try:
        yield
    except Exception as error:
        # Whoever catches it prints it. A traceback is for errors that nobody expected.
        expected = isinstance(error, UserMistake | RunFailed)
        said = str(error).strip() or type(error).__name__
        LOGGER.error("%s", said, exc_info=not expected, extra={PRINTED: True, EVENT: False})
        raise
    finally:
        for other in others:
            assert other is not None
            root.removeHandler(other)
        for handler in (log, terminal):
            LOGGER.removeHandler(handler)
            handler.close()
        LOGGER.setLevel(before)


def write_logs_to(logs: Path, rank: int | None, events: EventLog | None, terminal: int | None = None) -> None:
    """The run's folder is this process's: log there. `terminal`: a descriptor for warnings of a rank other than 0."""
    for handler in LOGGER.handlers:
        if isinstance(handler, RunLog) and not handler.opened:
            handler.open(logs, rank, events)
        if isinstance(handler, Terminal) and rank:
            handler.rank, handler.shared = rank, terminal


def current_events() -> EventLog | None:
    """The event log that warnings go to, on rank 0 and in the launcher of a run."""
    return next((one.events for one in LOGGER.handlers if isinstance(one, RunLog)), None)
