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
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from shoal.mistakes import RunFailed

Item = TypeVar("Item")
Result = TypeVar("Result")

# Items sent to a worker and not yet answered: it computes one while the next waits, so that it is never idle.
_AHEAD = 2
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
    # A forked worker needs no imports and shares the parent's memory; only Linux's libraries are safe after a fork.
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    connections: list[Connection] = []
    processes: list[Any] = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            connections.append(ours)
            # A forked worker inherits the parent's ends of all pipes so far, and closes them: a pipe whose other end
            # is gone tells a worker that the parent has died.
            inherited = list(connections) if sys.platform == "linux" else []
            process = context.Process(target=_serve, args=(theirs, inherited, work, prepare), daemon=True)
            with warnings.catch_warnings():
                # Python warns of forks with threads; the workers take no lock that a thread may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            processes.append(process)
            theirs.close()
        waiting: deque[int] = deque()
        for number, item in enumerate(items):
            if len(waiting) == _AHEAD * workers:
                first = waiting.popleft()
                yield _receive(connections[first], processes[first])
            index = number % workers
            _send(connections[index], processes[index], item)
            waiting.append(index)
        while waiting:
            first = waiting.popleft()
            yield _receive(connections[first], processes[first])
    finally:
        for process in processes:  # all at first, so that an impatient second Ctrl-C finds them killed
            process.kill()
        for connection in connections:
            connection.close()
        for process in processes:
            process.join()


def _send(connection: Connection, process: Any, item: object) -> None:
    try:
        connection.send(item)
    except (BrokenPipeError, ConnectionResetError):
        raise _died(process) from None


def _receive(connection: Connection, process: Any) -> Any:
    try:
        # A signal that arrives just before a blocking read would be handled only after it.
        while not connection.poll(1.0):
            pass
        succeeded, result = connection.recv()
    except (EOFError, ConnectionResetError):
        raise _died(process) from None
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
    # otherwise both could wait for each other with full pipes.
    threading.Thread(target=_take, args=(connection, arrived), daemon=True).start()
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


def _take(connection: Connection, arrived: "queue.SimpleQueue[Any]") -> None:
    while True:
        try:
            item = connection.recv()
        except (EOFError, OSError):
            arrived.put(None)
            return
        arrived.put((item,))
