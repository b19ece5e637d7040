"""Read JSON Lines files that other processes append to."""

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

MOST_READ = 64 * 2**20  # bytes of new lines that are read at once


@dataclass
class GrowingLines:
    """The complete lines of a file. A line that is not complete yet is left for the next call, one that is damaged out.
    A file that was replaced is read from its start.

    Without `follow_links`, a symbolic link counts as missing.
    """

    path: Path
    follow_links: bool = True
    lines: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0
    _inode: int = 0
    _files: int = 0  # how many were found at the path, one after another

    def read(self) -> list[dict[str, Any]]:
        """All lines so far."""
        files = self._files
        new = self.read_new()
        self.lines = new if self._files != files else [*self.lines, *new]
        return self.lines

    def read_new(self) -> list[dict[str, Any]]:
        """The lines since the last call."""
        new: list[dict[str, Any]] = []
        if not self.follow_links and self.path.is_symlink():
            return new
        try:
            with open_regular(self.path) as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:  # another file
                    self._offset, self._inode, self._files = 0, found.st_ino, self._files + 1
                file.seek(self._offset)
                while content := file.read(MOST_READ):
                    complete, newline, _ = content.rpartition(b"\n")
                    if not newline:
                        break
                    self._offset += len(complete) + 1
                    file.seek(self._offset)
                    new += _parsed(complete.split(b"\n"))
        except OSError:
            pass
        return new


def _parsed(lines: list[bytes]) -> Iterator[dict[str, Any]]:
    try:  # all at once takes half the time of one by one
        yield from _objects(json.loads(b"[" + b",".join(filter(None, lines)) + b"]"))
        return
    except (ValueError, RecursionError):
        pass  # one is damaged: leave out that one
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        yield from _objects([found])


def _objects(found: list[Any]) -> Iterator[dict[str, Any]]:
    return (one for one in found if isinstance(one, dict))


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read bytes; raises FileNotFoundError for folders, and for pipes, where reading would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(path)
    return os.fdopen(descriptor, "rb")
