"""Run training in processes that tasks of srun, of MPI or of torchrun start and watch, on one node or several.

Each task starts the processes of its devices. Tasks tell each other through small files beside the run's folder, which
they share (`launch.board`): every task how its processes ended, and the first one what all of them do next. So a run on
several nodes is restarted, and started with a smaller micro-batch, as a run on one node is.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.crash import report_trace
from shoal.launch.board import GRACE, LATE, POLL, Board, Order, first_report, read
from shoal.launch.environment import LAUNCH_FOLDER, Placement
from shoal.launch.join import SEVERAL_NODES
from shoal.launch.local import prepared, record_restart, refuse_hooks, restart_sentence, worker_arguments
from shoal.launch.processes import FAILED, HUNG, MISTAKE, OUT_OF_MEMORY, RESULT
from shoal.launch.rank import Request, send_output_to
from shoal.mistakes import RunFailed, UserMistake
from shoal.observe.progress import Reporter
from shoal.resilience.signals import LAUNCHER, STOP_SIGNALS, second_signal_ends
from shoal.train.loop import Summary

# Of a failure that is only the consequence of another rank's.
CONSEQUENCES = ("onnection closed by peer", "onnection reset", "onnection refused", "roken pipe", "Timed out waiting")


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
        task = Task(self, request, Board(request.run.path, self.place))
        if self.place.rank:
            return task.follow()
        world_size, reporter = self.place.world_size * self.processes, Reporter(enabled=True)
        try:
            with prepared(request, world_size, reporter):
                reporter.say(f"Starting {world_size} processes in {self.place.world_size} tasks …")
                return task.lead(reporter)
        except (UserMistake, RunFailed) as failure:
            task.board.end("mistake" if isinstance(failure, UserMistake) else "failed", str(failure))
            raise
        except Exception:
            task.board.end("failed", "The first task failed; its output says why.")
            raise
        finally:
            task.board.close()


@dataclass
class Task:
    """This task: its processes, and the orders for them."""

    launcher: JoinedTasks
    request: Request
    board: Board
    stopped: bool = False
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def follow(self) -> Summary:
        """As one of the others, until the first task says that it is over."""
        board, within = self.board, self.board.timeout
        with self._stoppable(speaks=False):
            while not (order := board.next_order(within)).end:
                os.close(send_output_to(self.request.run.logs / f"task-{board.place.rank}.log"))
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
                restarted = f"All processes were restarted (restart {restarts} of {self.request.max_restarts})."
                record_restart(self.request.run, reporter, f"{why} {restarted}")

    def _shrunk(self, found: Mapping[str, Any], reporter: Reporter) -> dict[str, Any]:
        smaller = found["smaller"]
        if self.request.config.train.on_oom != "shrink" or smaller is None:
            raise RunFailed(f"{found['sentence']}\n{found['report']}")
        record_restart(self.request.run, reporter, restart_sentence(found))
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
