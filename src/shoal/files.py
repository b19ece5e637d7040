"""Writing files so that a crash leaves the old contents or the new, and nothing between."""

import os
from pathlib import Path


def write_atomically(path: Path, contents: str | bytes) -> None:
    """Temporary file, sync, rename, sync of the folder."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.write(contents.encode() if isinstance(contents, str) else contents)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Until the disk has this file, or this folder's list of files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
