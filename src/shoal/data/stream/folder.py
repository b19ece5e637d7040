"""Streamed data on disk: a folder of prepared chunks, made by one process and read by all.

A builder process tokenizes chunks ahead of those who read them and deletes what all have passed. It and its readers
share nothing but this folder, so they may be the ranks of one run or of several, on one machine or, where the cache is
on a shared disk, on many. Which of them started the builder does not matter: if it dies, the next to wait starts
another.
"""

import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from shoal.files import write_atomically

ALL = 10**8  # no stream has as many chunks
NEXT = "next.json"  # in a chunk: where the one after it begins


@dataclass(frozen=True)
class Cursor:
    """Where a chunk begins: so many records into a file, counted in the order that files have in this epoch."""

    epoch: int = 0
    file: int = 0
    record: int = 0


@dataclass(frozen=True)
class Want:
    """What a reader needs: no chunk before `low`, and those from `next` on, which begins at `cursor`."""

    low: int
    next: int
    cursor: Cursor


class StreamFolder:
    """The folder of one stream."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._readers = path / "readers"
        self._lock = path / "builder.lock"
        self._failure = path / "failure.txt"

    def chunk(self, number: int) -> Path:
        """The folder of a chunk, which is renamed into place when it is complete."""
        return self.path / f"chunk-{number:08d}"

    def next_cursor(self, number: int) -> Cursor:
        return Cursor(**json.loads((self.chunk(number) / NEXT).read_text()))

    def delete_before(self, low: int) -> None:
        """Delete the chunks that no reader needs. Those who have one of them memory-mapped keep it."""
        for folder in self.path.glob("chunk-*"):
            if folder.name < self.chunk(low).name:
                gone = folder.with_name(f"deleted-{folder.name}")
                with suppress(OSError):
                    folder.rename(gone)  # at once: a chunk is complete or absent
                shutil.rmtree(gone, ignore_errors=True)

    def delete(self) -> None:
        """Delete the chunks, and the folder unless there is a new reader: it starts another builder."""
        self.delete_before(ALL)
        self.report_failure(None)
        with suppress(OSError):
            self._readers.rmdir()  # fails if it has a reader
            self._lock.unlink()
            self.path.rmdir()

    # The builder

    @contextmanager
    def only_builder(self) -> Iterator[bool]:
        """Whether this process is the only builder, as long as it holds this."""
        with self._lock.open("w") as file:
            yield _try_lock(file)

    def has_builder(self) -> bool:
        with self.only_builder() as free:
            return not free

    def report_failure(self, sentence: str | None) -> None:
        """Tell the readers why there will be no more chunks; None: there will be."""
        if sentence is None:
            self._failure.unlink(missing_ok=True)
        else:
            write_atomically(self._failure, sentence)

    def failure(self) -> str | None:
        try:
            return self._failure.read_text()
        except FileNotFoundError:
            return None

    def wants(self) -> list[Want] | None:
        """What the readers need; None if there are no readers. Readers that have died are forgotten."""
        found, readers = [], 0
        for file in self._readers.glob("*.json"):
            with suppress(FileNotFoundError), file.open("r+") as opened:
                if _try_lock(opened):
                    file.unlink(missing_ok=True)
                    continue
                readers += 1
                with suppress(ValueError, KeyError, TypeError):  # it is being written: next time
                    value = json.loads(opened.read())
                    if value is not None:
                        found.append(Want(value["low"], value["next"], Cursor(**value["cursor"])))
        return found if readers else None

    def reader(self) -> "Reader":
        while True:
            self._readers.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # the builder of earlier readers has just deleted it
                return Reader(self._readers)


class Reader:
    """One who reads the stream. Its file is locked as long as it lives."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / f"{uuid.uuid4().hex}.json"
        # Locked under another name first: a file that is not locked is that of a reader who has died.
        hidden = self._path.with_suffix(".new")
        self._file = hidden.open("w")
        self._file.write("null")
        self._file.flush()
        fcntl.flock(self._file, fcntl.LOCK_EX)
        hidden.rename(self._path)

    def ask(self, want: Want | None) -> None:
        """Say what is needed; None: nothing, for now."""
        text = json.dumps(None if want is None else asdict(want))
        # In place, because the lock belongs to this file. A builder that reads half of it looks again.
        os.pwrite(self._file.fileno(), text.encode().ljust(256), 0)

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        self._file.close()


def _try_lock(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
