"""Run several processes of one module on this node with PyTorch's elastic agent.

They report to the launcher through files in a folder of this launch: rank 0 its result, and any rank an error message.
"""

import json
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ErrorHandler, ProcessFailure, record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.crash import report_trace
from shoal.files import write_atomically
from shoal.launch.environment import LAUNCH_FOLDER
from shoal.launch.interfaces import GLOO, check_interfaces
from shoal.launch.join import attempt
from shoal.mistakes import RanksLost, RunFailed, UserMistake
from shoal.resilience.signals import LAUNCHER, die_with_parent, second_signal_ends
from shoal.temporary import temporary_folder

RESULT, MISTAKE, FAILED, HUNG = "result.json", "mistake", "failed", "hung"
OUT_OF_MEMORY = "out-of-memory"


class _AtomicErrorFile(ErrorHandler):
    """Writes the error of a rank for the agent, complete or not at all: a rank may be killed while it writes, and the
    agent fails on a file that is not JSON."""

    def record_exception(self, e: BaseException) -> None:
        file = os.environ.get("TORCHELASTIC_ERROR_FILE")
        if file is None:
            return
        temporary = f"{file}.tmp"
        os.environ["TORCHELASTIC_ERROR_FILE"] = temporary
        try:
            super().record_exception(e)
        finally:
            os.environ["TORCHELASTIC_ERROR_FILE"] = file
        Path(temporary).replace(file)


# For the main function of a rank: its exception reaches the launcher.
record_errors = partial(record, error_handler=_AtomicErrorFile())


class RanOut(RunFailed):
    """A rank ran out of memory. `found` is its report, `restarts` the number of restarts before."""

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
    speaks: bool = False,
    warn: Callable[[str], None] = lambda sentence: None,
    crashes: Path | None = None,
) -> dict[str, Any] | None:
    """Run `python -m MODULE` as `processes` ranks and return the result of rank 0; None if it was stopped.

    `patience` is the number of seconds for ranks to exit after a request to stop; with `speaks`, such a request is
    answered on standard error. A message of `report_failure` is
    raised here or, if the ranks were restarted, given to `warn`. One of `report_out_of_memory` is raised as `RanOut`.
    The traceback of a rank is written to a file in `crashes`.
    """
    check_interfaces([GLOO] if processes > 1 else [])
    with temporary_folder() as shared:
        os.environ[LAUNCH_FOLDER], os.environ[LAUNCHER] = str(shared), str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes)))
        # Otherwise the agent opens a TCP store for the ranks, on every interface.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        _quiet_agent()
        settings = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            logs_specs=DefaultLogsSpecs(log_dir=str(shared)),  # otherwise the agent leaves a temporary folder behind
            run_id=shared.name,
            # The agent's rendezvous uses a file store too: a TCP store would listen on every interface.
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
            clean_up = partial(shutil.rmtree, shared, ignore_errors=True)
            with _report_restarts(shared, max_restarts, warn), second_signal_ends(before=clean_up, speaks=speaks):
                elastic_launch(settings, sys.executable)("-m", module, *arguments)
        except ChildFailedError as failure:
            # A failure after the result was written is one of process exit and loses nothing.
            if not (shared / RESULT).is_file():
                _explain(failure, shared, crashes)
        except SignalException:
            if not (shared / RESULT).is_file():
                return None
        finally:
            del os.environ[LAUNCH_FOLDER], os.environ[LAUNCHER]
            for number, handler in before:
                signal.signal(number, handler)
        if not (shared / RESULT).is_file():  # a rank reported a failure and exited with status 0
            _raise_reported(shared)
        found: dict[str, Any] = json.loads((shared / RESULT).read_text())
        return found


def begin_rank() -> None:
    """Must be called first in a rank."""
    die_with_parent()
    shared = Path(os.environ[LAUNCH_FOLDER])
    if any(shared.glob(f"{OUT_OF_MEMORY}-{attempt() - 1:03d}-*")):
        # The agent restarts after any failure, also of the ranks that waited for the one without memory. The same
        # micro-batch would fail again: the launcher decides what to do.
        os._exit(0)
    (shared / f"begun-{attempt()}").touch()


def report_result(result: Mapping[str, Any]) -> None:
    """On rank 0: set the return value of `run_processes`."""
    write_atomically(Path(os.environ[LAUNCH_FOLDER]) / RESULT, json.dumps(result))


def report_failure(kind: str, sentence: str) -> None:
    """On any rank: report an error message in place of a traceback. The lowest rank's message is raised."""
    name = f"{kind}-{attempt():03d}-{int(os.environ['RANK']):05d}"
    write_atomically(Path(os.environ[LAUNCH_FOLDER]) / name, sentence)


def measure_as_worker(measure: Callable[[], Mapping[str, Any] | None]) -> NoReturn:
    """The main function of a rank that measures and does not train. What `measure` returns on rank 0 is the result."""
    begin_rank()
    # Standard output belongs to the launcher: redirect what libraries print.
    os.dup2(2, 1)
    # The launcher reports the error of the rank that failed first, once.
    sys.excepthook = lambda *_: None
    try:
        result = measure()
        if result is not None:
            report_result(result)
    except UserMistake as mistake:
        report_failure(MISTAKE, str(mistake))
        sys.exit(2)
    # As in `launch.worker`: PyTorch threads can abort an interpreter that exits normally.
    sys.stderr.flush()
    os._exit(0)


def report_out_of_memory(found: Mapping[str, Any]) -> None:
    """On a rank that ran out of memory."""
    report_failure(OUT_OF_MEMORY, json.dumps(found))


def _reports(shared: Path, kind: str) -> list[Path]:
    """Reports of the latest attempt."""
    return sorted(shared.glob(f"{kind}-{_attempts(shared) - 1:03d}-*"))


def _attempts(shared: Path) -> int:
    """The number of times the ranks were started."""
    return len(list(shared.glob("begun-*")))


def _raise_reported(shared: Path) -> None:
    for said in _reports(shared, OUT_OF_MEMORY):
        raise RanOut(json.loads(said.read_text()), restarts=_attempts(shared) - 1) from None
    for kind, error in ((MISTAKE, UserMistake), (FAILED, RunFailed), (HUNG, RanksLost)):
        for said in _reports(shared, kind):
            raise error(said.read_text()) from None


@contextmanager
def _report_restarts(shared: Path, max_restarts: int, warn: Callable[[str], None]) -> Iterator[None]:
    """Warn of restarts, of which the agent prints nothing."""
    over = threading.Event()

    def look() -> None:
        told = 0
        # Soon enough that a restart is recorded before the ranks that were started again record their start.
        while not over.wait(0.1):
            if _attempts(shared) > told + 1:
                told = _attempts(shared) - 1
                hung = sorted(shared.glob(f"{HUNG}-{told - 1:03d}-*"))
                why = hung[0].read_text() if hung else "A process died."
                warn(f"{why} All processes were restarted (restart {told} of {max_restarts}).")

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _quiet_agent() -> None:
    """Silence the agent's loggers, each of which has a level of its own: the launcher reports failures."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _patience(seconds: float) -> dict[str, Any]:
    """The agent's shutdown timeout, where it is configurable. After its default of 30 seconds it kills ranks."""
    known = {field.name for field in fields(LaunchConfig)}
    return {"shutdown_timeout": round(seconds)} if "shutdown_timeout" in known else {}


def _as_terminate(number: int, frame: FrameType | None) -> None:
    """The agent forwards SIGTERM to the ranks. SIGUSR1 and SIGUSR2 mean the same, but would end the agent."""
    raise SignalException(f"asked to stop by signal {number}", sigval=signal.SIGTERM)


def cause_of(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """The rank whose failure caused the others.

    Timestamps are not enough: they are in whole seconds, and the survivors of a killed rank may report their lost
    connection before the agent finds the dead rank.
    """

    def order(rank: int) -> tuple[int, int, int]:
        ended = failures[rank].exitcode
        if ended == -signal.SIGTERM:  # sent by the agent, after the first failure
            certainty = 2
        elif ended < 0 and ended != -signal.SIGABRT:  # not caused by a failure of another rank
            certainty = 0
        else:
            certainty = 1
        return certainty, failures[rank].timestamp, rank

    first = min(failures, key=order)
    return first, failures[first]


def _explain(failure: ChildFailedError, shared: Path, crashes: Path | None) -> NoReturn:
    _raise_reported(shared)
    rank, first = cause_of(failure.failures)
    if first.exitcode < 0:
        killed = f"Rank {rank} was killed by {signal.Signals(-first.exitcode).name}"
        memory = " (by the system, if the memory was full)" if first.exitcode == -signal.SIGKILL else ""
        raise RanksLost(f"{killed}{memory}.") from None
    message = first.message
    trace = str(message.get("extraInfo", {}).get("py_callstack", "")) if isinstance(message, dict) else ""
    if not trace:  # it ended before it could record an error
        raise RunFailed(f"Rank {rank} ended with status {first.exitcode}; its output says why.") from None
    assert isinstance(message, dict)
    what = f"Rank {rank} failed with an error that shoal did not expect"
    raise RunFailed(report_trace(what, str(message.get("message", "")), trace, crashes)) from None
