"""Run training in processes that tasks of srun, of MPI or of torchrun start and watch, on one node or several.

Each task starts the processes of its devices. Tasks share the run's folder, and tell each other through small files
beside it: every task how its processes ended, and the first one what all of them do next. So a run on several nodes is
restarted, and started with a smaller micro-batch, as a run on one node is.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.crash import report_trace
from shoal.files import write_atomically
from shoal.launch.environment import LAUNCH_FOLDER, Placement
from shoal.launch.join import SEVERAL_NODES
from shoal.launch.local import prepared, refuse_hooks, restart_sentence, worker_arguments
from shoal.launch.processes import FAILED, HUNG, MISTAKE, OUT_OF_MEMORY, RESULT
from shoal.launch.rank import Request, send_output_to
from shoal.launch.rendezvous import DEFAULT_TIMEOUT, JOIN_TIMEOUT
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.progress import Reporter
from shoal.resilience.signals import LAUNCHER, STOP_SIGNALS, second_signal_ends
from shoal.train.loop import Summary

POLL = 0.2
# Seconds for processes to fail by themselves, with a better message, after another has.
GRACE = 5.0
# Seconds for a task to say how its processes ended, after others have.
LATE = 30.0
# Seconds between two signs of life of a task, and after which one without is gone: a network disk may show them late.
SIGN, SILENT = 2.0, 90.0
# Of a failure that is only the consequence of another rank's.
CONSEQUENCES = ("onnection closed by peer", "onnection reset", "onnection refused", "roken pipe", "Timed out waiting")


@dataclass(frozen=True)
class Order:
    """What every task does next, as the first task says."""

    number: int
    tasks: list[str]  # for which it is: files of an earlier launch may be left
    restarts: int = 0
    overrides: dict[str, Any] = field(default_factory=dict)
    end: str = ""  # "done", "mistake" or "failed": nothing more is started
    sentence: str = ""


def start_process(arguments: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *arguments], env=dict(environment), stdin=subprocess.DEVNULL)


@dataclass(frozen=True)
class JoinedTasks:
    """Starts `shoal.launch.worker` once per device of this task, together with the other tasks."""

    place: Placement
    processes: int

    def launch(self, request: Request) -> Summary:
        """Run the ranks until they end."""
        refuse_hooks(request, self.processes * self.place.world_size)
        task = Task(self, request, Board(request, self.place))
        if self.place.rank:
            return task.follow()
        world_size, reporter = self.place.world_size * self.processes, Reporter(enabled=True)
        try:
            with prepared(request, world_size, reporter) as config:
                reporter.say(f"Starting {world_size} processes in {self.place.world_size} tasks …")
                task.patience = config.train.hang_timeout
                return task.lead(reporter)
        except (UserMistake, RunFailed) as failure:
            task.board.end("mistake" if isinstance(failure, UserMistake) else "failed", str(failure))
            raise
        except Exception:
            task.board.end("failed", "The first task failed; its output says why.")
            raise
        finally:
            task.board.close()


class Board:
    """The folder of one launch, beside that of the run. Every file is written whole or not at all."""

    def __init__(self, request: Request, place: Placement) -> None:
        run = request.run.path
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


@dataclass
class Task:
    """This task: its processes, and the orders for them."""

    launcher: JoinedTasks
    request: Request
    board: Board
    patience: float = 600.0
    stopped: bool = False
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def follow(self) -> Summary:
        """As one of the others, until the first task says that it is over."""
        board, within = self.board, self.board.timeout
        with self._stoppable(speaks=False):
            while not (order := board.next_order(within)).end:
                send_output_to(self.request.run.logs / f"task-{board.place.rank}.log")
                self._run(order)
                within = 2 * LATE + GRACE
        result = read(board.folder / f"round-{order.number - 1}" / RESULT)
        (board.folder / f"read-{board.place.rank}").touch()
        if order.end == "mistake":
            raise UserMistake(order.sentence)
        if order.end == "failed" or not result:
            raise RunFailed(order.sentence)
        return Summary(**result)

    def lead(self, reporter: Reporter) -> Summary:
        """As the first task: decide what all do, until the run is over."""
        board = self.board
        board.gather()
        overrides: dict[str, Any] = {}
        restarts = 0
        with self._stoppable(speaks=True):
            while True:
                order = board.order(restarts=restarts, overrides=overrides)
                folder = board.round(order.number)
                ended = self._run(order)
                if result := read(folder / RESULT):
                    board.order(end="done")
                    return Summary(**result)
                if self.stopped:
                    raise RunFailed("The run was stopped before it could save.")
                if found := first_report(folder, OUT_OF_MEMORY):
                    overrides = self._shrunk(json.loads(found), reporter)
                    continue
                for kind, error in ((MISTAKE, UserMistake), (FAILED, RunFailed)):
                    if sentence := first_report(folder, kind):
                        raise error(sentence)
                why = first_report(folder, HUNG) or self._cause(folder, ended)
                if restarts == self.request.max_restarts or self._gone(ended):
                    raise RunFailed(why)
                restarts += 1
                reporter.warn(
                    f"{why} All processes were restarted (restart {restarts} of {self.request.max_restarts})."
                )

    def _shrunk(self, found: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
        smaller = found["smaller"]
        if self.request.config.train.on_oom != "shrink" or smaller is None:
            raise RunFailed(f"{found['sentence']}\n{found['report']}")
        reporter.warn(restart_sentence(found))
        overrides: dict[str, Any] = smaller["overrides"]
        return overrides

    def _run(self, order: Order) -> dict[int, dict[str, Any]]:
        """Run this task's processes until they have ended, and wait for the reports of the other tasks."""
        board, ended, failed_at = self.board, dict[int, int](), 0.0
        processes = self._start(order)
        while len(ended) < len(processes):
            for rank, process in processes.items():
                if rank not in ended and (status := process.poll()) is not None:
                    ended[rank] = status
            board.show_life()
            if not failed_at and (any(ended.values()) or self._failed_elsewhere(order)):
                failed_at = time.monotonic()
            if failed_at and time.monotonic() > failed_at + GRACE:
                break
            time.sleep(POLL)
        for rank, process in processes.items():
            if rank not in ended:  # it waits for one that has died
                process.kill()
                process.wait()
        board.report(order.number, ended)
        deadline = time.monotonic() + LATE
        while len(found := board.reports(order.number)) < board.place.world_size and board.place.rank == 0:
            if time.monotonic() > deadline and (failed_at or any(any(one["ended"].values()) for one in found.values())):
                break
            time.sleep(POLL)
        return found

    def _failed_elsewhere(self, order: Order) -> bool:
        """Whether a process of another task has failed, or its task is gone."""
        found = self.board.reports(order.number)
        return any(any(one["ended"].values()) for one in found.values()) or bool(self.board.silent() - found.keys())

    def _start(self, order: Order) -> dict[int, subprocess.Popen[bytes]]:
        place, count = self.board.place, self.launcher.processes
        folder = self.board.round(order.number)
        found = {}
        for index in range(count):
            rank = place.rank * count + index
            own = {
                "RANK": str(rank),
                "WORLD_SIZE": str(place.world_size * count),
                "LOCAL_RANK": str(index if count > 1 else place.local_rank),
                "LOCAL_WORLD_SIZE": str(place.local_world_size * count),
                LAUNCH_FOLDER: str(folder),
                LAUNCHER: str(os.getpid()),
                SEVERAL_NODES: "1",
                # As an elastic agent says it.
                "TORCHELASTIC_RESTART_COUNT": str(order.restarts),
                "TORCHELASTIC_MAX_RESTARTS": str(self.request.max_restarts),
                "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
                "TORCHELASTIC_USE_AGENT_STORE": str(False),
            }
            environment = {**os.environ, **own}
            environment.setdefault(
                "OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // int(own["LOCAL_WORLD_SIZE"])))
            )
            arguments = ["-m", "shoal.launch.worker", *worker_arguments(self.request, order.overrides or None)]
            found[rank] = start_process(arguments, environment)
        self.running = found
        if self.stopped:
            self._forward()
        return found

    def _cause(self, folder: Path, ended: Mapping[int, Mapping[str, Any]]) -> str:
        """Which rank failed, on which node, and of what."""
        if gone := self._gone(ended):
            return gone
        statuses = {int(rank): (status, one["host"]) for one in ended.values() for rank, status in one["ended"].items()}
        killed = [rank for rank, (status, _) in statuses.items() if status < 0 and status != -signal.SIGABRT]
        if killed:
            status, host = statuses[min(killed)]
            return f"Rank {min(killed)} on {host} was killed by {signal.Signals(-status).name}."
        errors = {rank: read(folder / f"error-{rank}.json").get("message", {}) for rank in sorted(statuses)}
        errors = {rank: one for rank, one in errors.items() if isinstance(one, dict) and one}
        own = {rank: one for rank, one in errors.items() if not any(part in str(one) for part in CONSEQUENCES)}
        for rank, one in (own or errors).items():
            trace = str(one.get("extraInfo", {}).get("py_callstack", ""))
            what = f"Rank {rank} on {statuses[rank][1]} failed with an error that shoal did not expect"
            return report_trace(what, str(one.get("message", "")), trace, self.request.run.logs)
        failed = min((rank for rank, (status, _) in statuses.items() if status), default=0)
        status, host = statuses.get(failed, (1, "its node"))
        return f"Rank {failed} on {host} ended with status {status}; its output says why."

    def _gone(self, ended: Mapping[int, Mapping[str, Any]]) -> str:
        """The tasks that no longer answer, with their ranks; empty if there is none."""
        count = self.launcher.processes
        for task in range(self.board.place.world_size):
            if task not in ended:
                host = read(self.board.folder / f"task-{task}").get("host", "its node")
                ranks = f"rank {task}" if count == 1 else f"ranks {task * count} to {(task + 1) * count - 1}"
                return f"Task {task} on {host} ({ranks}) does not answer: it or its node is gone."
        return ""

    @contextmanager
    def _stoppable(self, *, speaks: bool) -> Iterator[None]:
        """A signal is forwarded to the processes, which finish their step and save; a second one ends this task, and
        with it its processes."""
        with ExitStack() as stack:
            for number in STOP_SIGNALS:
                stack.callback(signal.signal, number, signal.signal(number, self._stop))
            leads = self.board.place.rank == 0
            clean_up = partial(shutil.rmtree, self.board.folder, ignore_errors=True) if leads else lambda: None
            stack.enter_context(second_signal_ends(before=clean_up, speaks=speaks))
            yield

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self.stopped:
            self.stopped = True
            self._forward()

    def _forward(self) -> None:
        for process in self.running.values():
            with suppress(OSError):
                os.kill(process.pid, signal.SIGTERM)


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
