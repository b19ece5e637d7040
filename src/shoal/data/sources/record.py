"""A record of a source: a dictionary with its file and line, and what to do with one that cannot be read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.mistakes import UserMistake

# Handles a mistake in one record or file: raises it (data.on_error: stop) or counts it and returns (skip).
OnBad = Callable[[UserMistake], None]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a source. `continued`: the next record continues the same document."""

    fields: dict[str, Any]
    file: Path
    line: int | None = None
    continued: bool = False

    @property
    def where(self) -> str:
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Reading:
    """What is read, and how. `root`: for hf, the folder with `files`, or the id of a dataset in the local cache."""

    source: str
    files: tuple[Path, ...]
    columns: Mapping[str, str] = field(default_factory=dict)  # a format's name of a column → the data's name
    split: str = "train"
    subset: str | None = None
    root: Path | str | None = None


def stop(mistake: UserMistake) -> None:
    raise mistake
