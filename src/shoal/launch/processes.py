"""Several processes of one program on this machine, started and watched by torch's elastic agent.

What they have to say to the launcher goes through files in a folder that only this launch knows: the first rank's
result, or a sentence of any rank that could not go on.
"""

import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.files import write_atomically
from shoal.launch.join import LAUNCH_FOLDER, attempt
from shoal.mistakes import RunFailed, UserMistake
from shoal.resilience.signals import LAUNCHER, die_with_parent, second_signal_ends

RESULT, MISTAKE, FAILED, HUNG = "result.json", "mistake", "failed", "hung"
OUT_OF_MEMORY = "out-of-memory"


class RanOut(RunFailed):
    """A rank's device had no memory left. `found` is what the rank left, `restarts` how often all were started again
    before."""

    def __init__(self, found: Mapping[str, Any], restarts: int) -> None:
        super().__init__(found, restarts)
        self.found = found
        self.restarts = restarts

    def __str__(self) -> str:
        return f"{self.found['sentence']}\n{self.found['report']}"


def run_processes(
    module: str,
    arguments: Sequence[str],
    processes: int,
    *,
    max_restarts: int = 0,
    patience: float = 30,
    warn: Callable[[str], None] = lambda sentence: None,
) -> dict[str, Any] | None:
    """Run `python -m MODULE` as `processes` ranks and return the result that the first left; None if it was stopped.

    `patience` is how many seconds ranks get to end once they were asked to. What a rank left by `leave_sentence` is
    raised here, or, if the ranks could be started again, told to `warn`; what it left by `leave_out_of_memory` is
    raised as `RanOut`.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        shared = Path(folder)
        os.environ[LAUNCH_FOLDER], os.environ[LAUNCHER] = folder, str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        # Without this the agent opens a store of its own for the ranks, on every interface.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        _quiet_agent()
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            logs_specs=DefaultLogsSpecs(log_dir=folder),  # else the agent leaves a folder of its own behind
            run_id=shared.name,
            # The agent's own meeting point is a file too: a TCP store would listen on every interface.
            rdzv_backend="c10d",
            rdzv_endpoint=str(shared / "rendezvous"),
            rdzv_configs={"store_type": "file"},
            max_restarts=max_restarts,
            start_method="spawn",
            local_addr="127.0.0.1",
            **_patience(patience),
        )
        before = [(number, signal.signal(number, _as_terminate)) for number in (signal.SIGUSR1, signal.SIGUSR2)]
        try:
            # A second signal ends this process, and with it the ranks: see `die_with_parent`.
            clean_up = partial(shutil.rmtree, folder, ignore_errors=True)
            with _telling_of_restarts(shared, warn), second_signal_ends(before=clean_up):
                elastic_launch(settings, sys.executable)("-m", module, *arguments)
        except ChildFailedError as failure:
            # A rank that dies after the result was written dies of leaving, with nothing left to lose.
            if not (shared / RESULT).is_file():
                _explain(failure, shared)
        except SignalException:
            if not (shared / RESULT).is_file():
                return None
        finally:
            del os.environ[LAUNCH_FOLDER], os.environ[LAUNCHER]
            for number, handler in before:
                signal.signal(number, handler)
        if not (shared / RESULT).is_file():  # the ranks ended without a fault, but with something to say
            _raise_sentence(shared)
        found: dict[str, Any] = json.loads((shared / RESULT).read_text())
        return found


def begin_rank() -> None:
    """The first thing that a rank does."""
    die_with_parent()
    shared = Path(os.environ[LAUNCH_FOLDER])
    if any(shared.glob(f"{OUT_OF_MEMORY}-{attempt() - 1:03d}-*")):
        # The agent restarts whatever fails, as the ranks did that waited for one without memory. The same again would
        # not help: what is to be done is the launcher's to say.
        os._exit(0)
    (shared / f"begun-{attempt()}").touch()


def leave_result(result: Mapping[str, Any]) -> None:
    """For the first rank: what `run_processes` is to return."""
    write_atomically(Path(os.environ[LAUNCH_FOLDER]) / RESULT, json.dumps(result))


def leave_sentence(kind: str, sentence: str) -> None:
    """For any rank: why it cannot go on, in place of a traceback. Of several ranks' the lowest's is passed on."""
    name = f"{kind}-{attempt():03d}-{int(os.environ['RANK']):05d}"
    write_atomically(Path(os.environ[LAUNCH_FOLDER]) / name, sentence)


def leave_out_of_memory(found: Mapping[str, Any]) -> None:
    """For a rank whose device has no memory left."""
    leave_sentence(OUT_OF_MEMORY, json.dumps(found))


def _sentences(shared: Path, kind: str) -> list[Path]:
    """What ranks of the latest attempt have left."""
    return sorted(shared.glob(f"{kind}-{_attempts(shared) - 1:03d}-*"))


def _attempts(shared: Path) -> int:
    """How often the ranks have been started."""
    return len(list(shared.glob("begun-*")))


def _raise_sentence(shared: Path) -> None:
    for said in _sentences(shared, OUT_OF_MEMORY):
        raise RanOut(json.loads(said.read_text()), restarts=_attempts(shared) - 1) from None
    for kind, error in ((MISTAKE, UserMistake), (FAILED, RunFailed), (HUNG, RunFailed)):
        for said in _sentences(shared, kind):
            raise error(said.read_text()) from None


@contextmanager
def _telling_of_restarts(shared: Path, warn: Callable[[str], None]) -> Iterator[None]:
    """The agent says nothing of its restarts, and a run that hung and was started again should not be a secret."""
    over = threading.Event()

    def look() -> None:
        told = 0
        while not over.wait(0.5):
            if _attempts(shared) > told + 1:
                told = _attempts(shared) - 1
                hung = sorted(shared.glob(f"{HUNG}-{told - 1:03d}-*"))
                why = hung[0].read_text() if hung else "A process died."
                warn(f"{why} All processes were started again, for the {_ordinal(told)} time.")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ordinal(number: int) -> str:
    return {1: "first", 2: "second", 3: "third"}.get(number, f"{number}th")


def _quiet_agent() -> None:
    """What the agent logs, the launcher says in a sentence. torch gives each of these loggers a level of its own."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _patience(seconds: float) -> dict[str, Any]:
    """Where torch's agent can be told to wait longer than its 30 seconds before it kills ranks that are saving."""
    known = {field.name for field in fields(LaunchConfig)}
    return {"shutdown_timeout": round(seconds)} if "shutdown_timeout" in known else {}


def _as_terminate(number: int, frame: FrameType | None) -> None:
    """The agent passes TERM on to the ranks, and would die of USR1 and USR2, which mean the same here."""
    raise SignalException(f"asked to stop by signal {number}", sigval=signal.SIGTERM)


def cause_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose death the others died of.

    Times alone do not tell: they are whole seconds, and the survivors of a rank that was killed may be faster to write
    down their lost connection than the agent is to find the dead one.
    """

    def order(rank: int) -> tuple[int, int, int]:
        ended = failures[rank].exitcode
        if ended == -signal.SIGTERM:  # sent by the agent, after the first death
            certainty = 2
        elif ended < 0 and ended != -signal.SIGABRT:  # nothing a peer does ends a process like this
            certainty = 0
        else:
            certainty = 1
        return certainty, failures[rank].timestamp, rank

    first = min(failures, key=order)
    return first, failures[first]


def _explain(failure: ChildFailedError, shared: Path) -> None:
    _raise_sentence(shared)
    rank, first = cause_of(failure.failures)
    if first.exitcode < 0:
        raise RunFailed(f"Rank {rank} was killed by {signal.Signals(-first.exitcode).name}.") from None
    message = first.message
    trace = ""
    if isinstance(message, dict):
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
    raise RunFailed(f"Rank {rank} failed.\n{trace or message}".rstrip()) from None
