"""Temporary folders. One that a killed process has left is removed at the next start."""

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "shoal-"
# The process that made the folder holds a lock on this file. The system releases it however the process ends, and no
# later process of the same number is taken for it.
OWNER = "owner"


@contextmanager
def temporary_folder(prefix: str = PREFIX) -> Iterator[Path]:
    """A new folder, removed at the end; those that killed processes have left are removed first."""
    remove_abandoned()
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        folder = Path(name)
        unlocked = folder / f"{OWNER}.tmp"
        with unlocked.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            unlocked.rename(folder / OWNER)  # once it is locked: before that, others would take it for abandoned
            yield folder


def remove_abandoned() -> None:
    """Remove the folders of this user's processes that have ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # not one of ours, in use, or removed meanwhile
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / OWNER).open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
