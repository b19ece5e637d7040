"""Several processes of one program on this machine, started and watched by torch's elastic agent.

What they have to say to the launcher goes through files in a folder that only this launch knows: the first rank's
result, or a sentence of any rank that could not go on.
"""

import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from shoal.files import write_atomically
from shoal.launch.join import LAUNCH_FOLDER
from shoal.mistakes import UserMistake

RESULT, MISTAKE = "result.json", "mistake"


class RunFailed(Exception):
    """Processes of the run died. The message ends with the traceback of the one that died first."""


def run_processes(
    module: str,
    arguments: Sequence[str],
    processes: int,
    *,
    max_restarts: int = 0,
    patience: float = 30,
    sentences: Mapping[str, type[Exception]] | None = None,
) -> dict[str, Any] | None:
    """Run `python -m MODULE` as `processes` ranks and return the result that the first left; None if it was stopped.

    `patience` is how many seconds ranks get to end once they were asked to. What a rank left by `leave_sentence` is
    raised as the exception that `sentences` has for its kind.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:
        shared = Path(folder)
        os.environ[LAUNCH_FOLDER] = folder
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
            elastic_launch(settings, sys.executable)("-m", module, *arguments)
        except ChildFailedError as failure:
            # A rank that dies after the result was written dies of leaving, with nothing left to lose.
            if not (shared / RESULT).is_file():
                _explain(failure, shared, {MISTAKE: UserMistake, **(sentences or {})})
        except SignalException:
            if not (shared / RESULT).is_file():
                return None
        finally:
            del os.environ[LAUNCH_FOLDER]
            for number, handler in before:
                signal.signal(number, handler)
        found: dict[str, Any] = json.loads((shared / RESULT).read_text())
        return found


def leave_result(result: Mapping[str, Any]) -> None:
    """For the first rank: what `run_processes` is to return."""
    write_atomically(Path(os.environ[LAUNCH_FOLDER]) / RESULT, json.dumps(result))


def leave_sentence(kind: str, sentence: str) -> None:
    """For any rank: why it cannot go on, in place of a traceback. Of several ranks' the lowest's is passed on."""
    write_atomically(Path(os.environ[LAUNCH_FOLDER]) / f"{kind}-{int(os.environ['RANK']):05d}", sentence)


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
    os.kill(os.getpid(), signal.SIGTERM)


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


def _explain(failure: ChildFailedError, shared: Path, sentences: Mapping[str, type[Exception]]) -> None:
    for name, kind in sentences.items():
        for said in sorted(shared.glob(f"{name}-*")):
            raise kind(said.read_text()) from None
    rank, first = cause_of(failure.failures)
    if first.exitcode < 0:
        raise RunFailed(f"Rank {rank} was killed by {signal.Signals(-first.exitcode).name}.") from None
    message = first.message
    trace = ""
    if isinstance(message, dict):
        trace = str(message.get("extraInfo", {}).get("py_callstack", ""))
    raise RunFailed(f"Rank {rank} failed.\n{trace or message}".rstrip()) from None
