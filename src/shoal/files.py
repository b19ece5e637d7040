"""Atomic file writes: a crash leaves either the old or the new contents."""

import os
from contextlib import suppress
from pathlib import Path

TEMPORARY = ".tmp"  # suffix of a file that is being written


def write_atomically(path: Path, contents: str | bytes) -> None:
    """Write to a temporary file, fsync it, rename it, and fsync the folder."""
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with temporary.open("wb") as file:
            file.write(contents.encode() if isinstance(contents, str) else contents)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
