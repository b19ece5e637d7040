"""A function applied to many items by worker processes, with the results in the order of the items."""

import gc
import multiprocessing
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeVar

from shoal.mistakes import RunFailed

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items sent to a worker and not yet answered: it computes one while the next waits, so that it is never idle.
_AHEAD = 2
# Items per worker that are sent or answered, but not yet yielded: while one worker computes a long item, the others go
# on with those after it.
_WINDOW = 4
_MOST = 64


def choose_workers() -> int:
    """How many worker processes this process may start: one per core; 0 with a single core, or in a daemonic process,
    which may not have children."""
    cores = min(available_cores(), _MOST)
    return 0 if cores < 2 or multiprocessing.current_process().daemon else cores


def available_cores(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """The cores that this process may use: its affinity, and the CPU limit of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for names in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):  # of versions 2 and 1
        try:
            quota, period = " ".join((cgroups / name).read_text() for name in names).split()
            if quota.isdigit():  # not `max`, nor -1
                cores = min(cores, max(round(int(quota) / int(period)), 1))
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return cores


def map_in_order(
    work: Callable[[Item], Result], items: Iterable[Item], workers: int, prepare: Callable[[], None]
) -> Iterator[Result]:
    """`map(work, items)`, computed by `workers` processes, each of which first calls `prepare`.

    A bounded number of items is read ahead. An exception of `work` is raised here, in the order of the items. Close the
    iterator to end the processes; they also end when this process dies.
    """
    team: list[_Worker] = []
    try:
        for _ in range(workers):
            team.append(_start(work, prepare, team))
        answers: dict[int, tuple[bool, Any]] = {}
        yielded = 0
        for number, item in enumerate(items):
            while number - yielded == _WINDOW * workers or all(len(one.sent) == _AHEAD for one in team):
                _receive(team, answers)
                while yielded in answers:
                    yield _result(answers.pop(yielded))
                    yielded += 1
            min(team, key=lambda one: len(one.sent)).send(number, item)
        while answers or any(one.sent for one in team):
            while yielded not in answers:
                _receive(team, answers)
            yield _result(answers.pop(yielded))
            yielded += 1
    finally:
        for one in team:  # all at first, so that an impatient second Ctrl-C finds them killed
            one.process.kill()
        for one in team:
            one.connection.close()
        for one in team:
            one.process.join()


@dataclass(frozen=True, eq=False)
class _Worker:
    """The parent's view of a worker process. `sent`: the numbers of the items that it has not answered, in order."""

    process: Any
    connection: Connection
    sent: deque[int] = field(default_factory=deque)

    def send(self, number: int, item: object) -> None:
        try:
            self.connection.send(item)
        except (BrokenPipeError, ConnectionResetError):
            raise _died(self.process) from None
        self.sent.append(number)

    def receive(self) -> tuple[bool, Any]:
        try:
            answer: tuple[bool, Any] = self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise _died(self.process) from None
        return answer


def _start(work: Callable[[Any], Any], prepare: Callable[[], None], others: list[_Worker]) -> _Worker:
    # A forked worker needs no imports and shares the parent's memory; only Linux's libraries are safe after a fork.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    ours, theirs = context.Pipe()
    # A forked worker inherits the parent's ends of all pipes so far, and closes them: a pipe whose other end is gone
    # tells a worker that the parent has died.
    inherited = [ours, *(one.connection for one in others)] if sys.platform == "linux" else []
    process = context.Process(target=_serve, args=(theirs, inherited, work, prepare), daemon=True)
    with warnings.catch_warnings():
        # Python warns of forks with threads; the workers take no lock that a thread may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return _Worker(process, ours)


def _receive(team: list[_Worker], answers: dict[int, tuple[bool, Any]]) -> None:
    """Take an answer of each worker that has one, at least one in all."""
    # A signal that arrives just before a blocking read would be handled only after it.
    while not (ready := wait([one.connection for one in team if one.sent], timeout=1.0)):
        pass
    for one in team:
        if one.connection in ready:
            answers[one.sent.popleft()] = one.receive()


def _result(answer: tuple[bool, Any]) -> Any:
    succeeded, result = answer
    if not succeeded:
        raise result
    return result


def _died(process: Any) -> RunFailed:
    process.join(10)
    status = process.exitcode
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        return RunFailed(
            f"A process that tokenizes the data was killed by {name}"
            + ("; if the memory was full, free some and start again." if status == -signal.SIGKILL else ".")
        )
    return RunFailed(f"A process that tokenizes the data ended unexpectedly, with status {status}.")


def _serve(
    connection: Connection, inherited: list[Connection], work: Callable[[Any], Any], prepare: Callable[[], None]
) -> None:
    """Answer items until the pipe closes."""
    # Signals go to the whole process group: the parent handles them, and then ends this process.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    for other in inherited:
        other.close()
    gc.freeze()  # a collection that visits the parent's objects would copy the memory that is shared with it
    prepare()
    arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
    # Items are taken from the pipe at once, so that the parent's send never waits for this process to finish one:
    # otherwise both could wait for each other with full pipes. The work is done in a thread, because glibc gives a
    # thread memory of its own: in what the main thread inherits from the parent, full of gaps, the tokenizers library,
    # which allocates for each token, takes a third longer.
    answering = threading.Thread(target=_answer, args=(connection, arrived, work), daemon=True)
    answering.start()
    _take(connection, arrived)
    answering.join()


def _answer(connection: Connection, arrived: "queue.SimpleQueue[Any]", work: Callable[[Any], Any]) -> None:
    try:
        while (item := arrived.get()) is not None:
            try:
                answer = (True, work(item[0]))
            except Exception as error:
                error.add_note("".join(traceback.format_exception(error)))
                answer = (False, error)
            connection.send(answer)
    except (BrokenPipeError, ConnectionResetError):
        pass  # the parent has ended
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # the main thread would wait for items for ever, and the parent for answers


def _take(connection: Connection, arrived: "queue.SimpleQueue[Any]") -> None:
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            arrived.put(None)
            return
        arrived.put((item,))
