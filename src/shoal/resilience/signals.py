"""The signals that ask a run to stop, and the immediate exit at the second one."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
# Signals within this many seconds of the first are the same request: Ctrl-C reaches every process of a terminal. A rank
# is also signalled by the launcher, possibly later, and ends with the launcher anyway.
SAME_REQUEST, SAME_REQUEST_FOR_RANKS = 0.3, 2.0
LAUNCHER = "SHOAL_LAUNCHER"  # the process that started this one as a rank
STOPPED_FILE = (
    "SHOAL_STOPPED"  # names a file that a run writes when it has saved and stopped early; it then exits with 0
)
JOB = "SLURM_JOB_ID"  # this process is part of a Slurm job
_PARENT_DEATH = 1  # prctl's PR_SET_PDEATHSIG


STOPPING_IN_JOB = "Stopping after this step, and saving a checkpoint."
STOPPING = "Stopping after this step, and saving a checkpoint. A second signal ends the run at once, without saving."
ENDED_AT_ONCE = "Ended at once: nothing was saved since the last checkpoint."


@contextmanager
def second_signal_ends(
    same_request: float = SAME_REQUEST, *, before: Callable[[], object] = lambda: None, speaks: bool = False
) -> Iterator[None]:
    """The first signal is left to its handler; a second ends the process at once, after calling `before`. One that
    `speaks` says so on standard error, at once too.

    Python runs handlers between bytecode instructions, and a main thread that waits for a device or for another process
    may never reach the next one. The wakeup file descriptor gets a signal's number at once, and a thread reads it.

    In a Slurm job only Ctrl-C ends it: Slurm asks again at the end of a grace period or at the time limit, when the run
    may still be saving, and kills it by itself some time later.
    """
    in_job = JOB in os.environ
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def count() -> None:
        first: float | None = None
        with os.fdopen(reading, "rb", buffering=0) as pipe:
            while received := pipe.read(1):
                if received[0] not in STOP_SIGNALS:
                    continue
                now = time.monotonic()
                if first is None:
                    first = now
                    _received.append(received[0])
                    _say((STOPPING_IN_JOB if in_job else STOPPING) if speaks else "")
                elif now - first > same_request and (not in_job or received[0] == signal.SIGINT):
                    _say(ENDED_AT_ONCE if speaks else "")
                    before()
                    os._exit(128 + received[0])

    threading.Thread(target=count, name="shoal-signals", daemon=True).start()
    earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(earlier)
        os.close(writing)  # ends the thread


_received: list[int] = []  # the first signal of each `second_signal_ends`


def received_signal() -> int | None:
    """The last signal that asked this process to stop, for what comes after a run that was stopped."""
    return _received[-1] if _received else None


def _say(sentence: str) -> None:
    # Not through Python's streams, which the main thread may have locked.
    if sentence:
        with suppress(OSError):
            os.write(2, f"\nshoal: {sentence}\n".encode())


def die_with_parent() -> None:
    """On Linux, kill this rank when its launcher dies, so that it does not keep its device."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PARENT_DEATH, signal.SIGKILL)
        if str(os.getppid()) != os.environ.get(LAUNCHER):  # it died before prctl was called
            os._exit(128 + signal.SIGKILL)


_early: list[int] = []  # user signals from before a `StopRequest`


def keep_user_signals() -> None:
    """In a Slurm job, from now on USR1 and USR2 do not end this process: the next `StopRequest` finds them.

    Slurm sends them before the time limit or before preemption, also to a job that is still importing torch. It would
    fail, and a job that has failed is not requeued.
    """
    if JOB in os.environ and threading.current_thread() is threading.main_thread():
        for number in USER_SIGNALS:
            signal.signal(number, lambda received, _: _early.append(received))


class StopRequest:
    """The first signal asks to finish the step, save and stop. A second one ends the process at once.

    Ranks must stop after the same step, or one would wait for the others forever: `wanted` is this rank's vote.
    """

    def __init__(self, same_request: float = SAME_REQUEST) -> None:
        self.signal: int | None = None
        self.same_request = same_request
        self._cleanup = ExitStack()

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def ask(self) -> None:
        """Ask as a signal would: by the program itself."""
        if self.signal is None:
            self.signal = signal.SIGTERM

    def __enter__(self) -> "StopRequest":
        self.signal = _early.pop() if _early else None
        if threading.current_thread() is threading.main_thread():  # only the main thread can install handlers
            for number in STOP_SIGNALS:
                self._cleanup.callback(signal.signal, number, signal.signal(number, self._receive))
            # One process of a run speaks: the launcher, or else rank 0.
            speaks = LAUNCHER not in os.environ and int(os.environ.get("RANK", "0")) == 0
            self._cleanup.enter_context(second_signal_ends(self.same_request, speaks=speaks))
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number


def leave_stopped_file() -> bool:
    """Tell the job script that the run has saved and stopped early, if it has asked for a file: see STOPPED_FILE."""
    file = os.environ.get(STOPPED_FILE)
    if not file:
        return False
    with open(file, "w"):
        pass
    return True
