"""Read the records of any source. Lazy, and always in the same order.

A new source is one reader and one line in `READERS`.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from shoal.catalogue.data_files import SUFFIXES
from shoal.data.sources.chess import read_chess
from shoal.data.sources.json_records import read_json
from shoal.data.sources.record import OnBad, Record, stop
from shoal.data.sources.text import read_text
from shoal.mistakes import UserMistake

Reader = Callable[[Path, OnBad], Iterator[Record]]
READERS: dict[str, Reader] = {"text": read_text, "json": read_json, "chess": read_chess}


def read_records(source: str, files: Sequence[Path], on_bad: OnBad = stop) -> Iterator[Record]:
    """The records of `files`, in order, read lazily."""
    check_source(source)
    reader = READERS[source]
    for file in files:
        try:
            yield from reader(file, on_bad)
        except OSError as error:
            raise UserMistake(
                f"{file} cannot be read ({error.strerror}). Check the path and its permissions."
            ) from error


def check_source(source: str) -> None:
    """A UserMistake if there is no reader for this `data.source`."""
    if source not in READERS:
        known = ", ".join(READERS)
        raise UserMistake(f"data.source {source} is not supported. Supported sources: {known}.")


def folder_suffixes(source: str) -> tuple[str, ...] | None:
    """Which files of a folder this source reads; None: all."""
    if source == "text":
        return None
    return (*SUFFIXES[source], ".txt") if source == "chess" else SUFFIXES[source]
