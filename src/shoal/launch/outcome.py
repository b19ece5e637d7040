"""How a run ended, in a file of its folder: for `shoal status`, which may be called long after."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from shoal.config.replaced import is_run
from shoal.files import write_atomically

OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    state: str  # finished, stopped (before the last step), failed
    why: str
    ended: float  # seconds since 1970


@contextmanager
def failure_recorded(run: Path, *, fresh: bool) -> Iterator[None]:
    """Write into the run folder, which this process holds, how this block failed. How the run ended before is
    forgotten; one that is not `fresh` is still that of the run to be replaced."""
    if fresh:
        with suppress(OSError):
            (run / OUTCOME).unlink()
    try:
        yield
    except BaseException as failure:
        _write(run, "failed", str(failure).strip() or type(failure).__name__)
        raise


def record_end(run: Path, stopped: str | None) -> None:
    """Write that the run ended well; `stopped`: why it ended before its last step, if it did."""
    _write(run, "stopped" if stopped in ("signal", "left") else "finished", stopped or "")


def read_outcome(run: Path) -> Outcome | None:
    """How the run ended; None if it has not, or was killed."""
    try:
        found = json.loads((run / OUTCOME).read_text())
        return Outcome(str(found["state"]), str(found["why"]), float(found["ended"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(run: Path, state: str, why: str) -> None:
    with suppress(OSError):  # the disk may be full or gone, of which the run itself has told
        if is_run(run):
            write_atomically(run / OUTCOME, json.dumps(asdict(Outcome(state, why, time.time()))) + "\n")
