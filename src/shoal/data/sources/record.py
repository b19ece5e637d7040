"""A record of a source: a dictionary with its file and line, and what to do with one that cannot be read."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.mistakes import UserMistake

# Handles a mistake in one record or file: raises it (data.on_error: stop) or counts it and returns (skip).
OnBad = Callable[[UserMistake], None]


@dataclass(slots=True)  # to make a frozen one takes twice as long, and there may be a billion
class Record:
    """One record of a source. `continued`: the next record continues the same document. `read`: bytes of the file up to
    its end, where the reader knows them; only progress is computed from it."""

    fields: dict[str, Any]
    file: Path
    line: int | None = None
    continued: bool = False
    read: int = 0

    @property
    def where(self) -> str:
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"

    def __reduce__(self) -> tuple[type["Record"], tuple[Any, ...]]:
        # Records are sent to worker processes, and Python's own way takes several times as long.
        return Record, (self.fields, self.file, self.line, self.continued, self.read)


@dataclass(frozen=True)
class Reading:
    """What is read, and how. `root`: for hf, the folder with `files`, or the id of a dataset in the local cache."""

    source: str
    files: tuple[Path, ...]
    columns: Mapping[str, str] = field(default_factory=dict)  # a format's name of a column → the data's name
    split: str = "train"
    subset: str | None = None
    root: Path | str | None = None


def file_by_file(read: Callable[[Path, OnBad], Iterator[Record]]) -> Callable[[Reading, OnBad], Iterator[Record]]:
    """A reader of many files from a reader of one."""

    def read_files(reading: Reading, on_bad: OnBad) -> Iterator[Record]:
        for file in reading.files:
            try:
                yield from read(file, on_bad)
            except OSError as error:
                raise UserMistake(
                    f"{file} cannot be read ({error.strerror}). Check the path and its permissions."
                ) from error

    return read_files


def stop(mistake: UserMistake) -> None:
    raise mistake
