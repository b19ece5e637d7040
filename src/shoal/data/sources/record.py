"""A record of a source: a dictionary with its file and line, and what to do with one that cannot be read."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.mistakes import UserMistake

# Handles a mistake in one record or file: raises it (data.on_error: stop) or counts it and returns (skip).
OnBad = Callable[[UserMistake], None]


@dataclass(frozen=True, slots=True)
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


def stop(mistake: UserMistake) -> None:
    raise mistake
