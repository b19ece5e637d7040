"""The lock of a run: one process at a time writes to its folder."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from shoal.mistakes import UserMistake

ATTEMPTS, BETWEEN_ATTEMPTS = 3, 0.02  # seconds: `holder` locks the file for a moment


@contextmanager
def locked(file: Path, *, otherwise: str) -> Iterator[None]:
    """Lock `file`, which exists only meanwhile, or raise a UserMistake that says `otherwise` if another process has.

    The operating system releases the lock however the process ends: a file that a killed process leaves is not locked.
    """
    attempts = ATTEMPTS
    while True:
        opened = file.open("a")
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            opened.close()
            attempts -= 1
            if attempts == 0:
                raise UserMistake(otherwise) from None
            time.sleep(BETWEEN_ATTEMPTS)
            continue
        except OSError:
            opened.close()
            raise
        if _is(file, opened):
            break
        opened.close()  # its holder removed it after this process had opened it: a lock that no third process sees
    with suppress(OSError):  # for `holder`; unbuffered, or closing the file would try again on a full disk
        os.ftruncate(opened.fileno(), 0)
        os.write(opened.fileno(), f"{os.getpid()} {socket.gethostname()}\n".encode())
    try:
        yield
    finally:
        with suppress(OSError):  # the disk may be gone
            file.unlink()
        opened.close()


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock."""

    process: int
    host: str


def holder(file: Path) -> Holder | None:
    """Who holds the lock; None: nobody, also if a killed process has left the file."""
    try:
        with file.open("r") as opened:  # reading is enough: the run may be another user's
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                process, _, host = opened.read().strip().partition(" ")
                return Holder(int(process), host) if process.isdigit() else Holder(0, "")
    except OSError:
        pass
    return None


def _is(path: Path, opened: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(opened.fileno()))
    except FileNotFoundError:
        return False
