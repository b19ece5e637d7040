"""The runs below the folder that the server was given, and nothing outside of it."""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shoal.config.replaced import is_run
from shoal.observe.run_reader import RunReader, RunRecord

DEEPEST = 4  # folders within folders, as a sweep or a user has them
MOST_RUNS = 300
MOST_FOLDERS = 5000  # that are looked into
MOST_KEPT = 400  # runs whose files are kept in memory


class RunsFolder:
    """Finds runs and reads them. Symbolic links below the folder are not followed."""

    def __init__(self, folder: Path) -> None:
        self.given = folder
        self.root = Path(os.path.realpath(folder))
        self._readers: OrderedDict[str, RunReader] = OrderedDict()
        self._records: dict[str, tuple[tuple[object, ...] | None, RunRecord | None]] = {}  # as they were at a stamp
        self._lock = threading.RLock()  # requests are answered in threads

    def names(self) -> list[str]:
        """The runs, by their path below the folder. The folder itself may be a run: its name is `.`."""
        if is_run(self.root):
            return ["."]
        return sorted(self._below(self.root, DEEPEST, iter(range(MOST_FOLDERS))))[:MOST_RUNS]

    def _below(self, folder: Path, depth: int, budget: Iterator[int]) -> Iterator[str]:
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            return
        for entry in entries:
            if not _is_plain(entry.name) or not entry.is_dir(follow_symlinks=False):
                continue
            if next(budget, None) is None:
                return
            path = Path(entry.path)
            if is_run(path):
                yield path.relative_to(self.root).as_posix()
            elif depth > 1:
                yield from self._below(path, depth - 1, budget)

    def find(self, name: str) -> Path | None:
        """The folder of a run by its name; None if it is no run, or leads out of the folder."""
        parts = [] if name == "." else name.split("/")
        if len(parts) > DEEPEST or not all(_is_plain(part) for part in parts):
            return None
        path = self.root.joinpath(*parts)
        try:
            inside = Path(os.path.realpath(path)) == path  # no part of it is a link
            return path if inside and is_run(path) else None
        except (OSError, ValueError):
            return None

    def stamp(self, name: str) -> str | None:
        """Changes when the run's files change; None if there is no such run."""
        reader = self._reader(name)
        return None if reader is None else f"{hash(reader.stamp()) & 0xFFFFFFFFFFFF:x}"

    def read(self, name: str, *, config: bool = True) -> RunRecord | None:
        """What the run's files say, without its `config` if that is not needed; None if there is no such run. Files
        that have not changed are not read again."""
        with self._lock:
            reader = self._reader(name)
            if reader is None:
                return None
            stamp, (known, record) = reader.stamp(), self._records.pop(name, (None, None))
            if record is None or known != stamp or (config and not record.config):
                record = reader.read(config=config)
            elif record.state == "running":
                record = replace(record, read=time.time())
            self._records[name] = (stamp, record)
            return record

    def read_all(self) -> None:
        """Read what the list of runs needs, ahead of the first request."""
        for name in self.names():
            self.read(name, config=False)

    def _reader(self, name: str) -> RunReader | None:
        path = self.find(name)
        with self._lock:
            if path is None:
                self._readers.pop(name, None)
                self._records.pop(name, None)
                return None
            reader = self._readers.pop(name, None) or RunReader(path, follow_links=False)
            self._readers[name] = reader
            while len(self._readers) > MOST_KEPT:
                oldest, _ = self._readers.popitem(last=False)
                self._records.pop(oldest, None)
            return reader


def _is_plain(name: str) -> bool:
    """Whether a folder of this name is shown: neither hidden, nor a run that was replaced, nor a way out."""
    return bool(name) and not name.startswith(".") and "~" not in name and "\0" not in name and "\\" not in name
