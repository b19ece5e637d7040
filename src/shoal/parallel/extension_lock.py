"""The lock of a kernel that PyTorch compiles: a process that was killed meanwhile leaves it, and others wait for it."""

import os
import time
from contextlib import suppress
from pathlib import Path

PROCESSES = Path("/proc")
RECENT = 30.0  # seconds: of ranks that start together, one compiles, maybe on another node


def abandoned_lock(extension: str) -> str | None:
    """A sentence if the lock of this extension exists and no process of this machine holds it; else None. One of
    another machine may, where they share the folder: so it is not removed here."""
    from torch.utils.cpp_extension import _get_build_directory  # imports setuptools

    lock = Path(_get_build_directory(extension, False)) / "lock"
    try:
        found = lock.stat()
    except OSError:
        return None
    age = time.time() - found.st_mtime
    if age < RECENT or _is_open(found):
        return None
    return (
        f"{lock} is {age / 60:.0f} min old, and no process of this machine compiles {extension}: one that did was "
        "killed. DeepSpeed waits until the file is gone; unless another machine compiles it, delete the file."
    )


def _is_open(file: os.stat_result) -> bool:
    """Whether a process of this machine has the file open, as PyTorch does while it compiles."""
    for opened in PROCESSES.glob("[0-9]*/fd/*"):
        with suppress(OSError):  # ended, or of another user
            one = opened.stat()
            if (one.st_dev, one.st_ino) == (file.st_dev, file.st_ino):
                return True
    return False
