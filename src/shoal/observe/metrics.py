"""`metrics.jsonl`, one object per line and append-only, and `metrics.csv`: writers and readers."""

import csv
import io
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from shoal.files import write_atomically

Line = Mapping[str, float | int | None]


@dataclass(frozen=True)
class About:
    """What a sink is told of the run."""

    run: Path
    name: str
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    step: int  # of the checkpoint that the run continues from; 0: a new run
    wandb: Mapping[str, str | None]
    mlflow: Mapping[str, str | None]
    newest_step: int = 0  # in `metrics.jsonl` when the run starts: one that was killed continues from an earlier one


class Sink(Protocol):
    name: str

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Writes each line in one call, so that a killed run leaves complete lines; one that a full disk or a power failure
    has cut is ended, so that the next is a line of its own.

    Lines that a full disk rejects are kept in memory and written with the next line.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._unwritten = b"\n" if ends_within_a_line(path) else b""

    def write(self, line: Line) -> None:
        self._unwritten += json.dumps(dict(line)).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        while self._unwritten:
            self._unwritten = self._unwritten[self._file.write(self._unwritten) :]

    def close(self) -> None:
        try:
            self._write()
        finally:
            self._file.close()


class Csv:
    """Training metrics in `metrics.csv`, evaluation metrics in `evaluation.csv`: their columns differ. A file of a
    run that began without a column is written anew with it."""

    name = "metrics.csv"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[IO[str], list[str]]] = {}

    def write(self, line: Line) -> None:
        name = "evaluation.csv" if "eval_loss" in line else "metrics.csv"
        file, columns = self._files.get(name) or self._open(name)
        if missing := [key for key in line if key not in columns]:
            file.close()
            columns = [*columns, *missing]
            _add_columns(self.folder / name, columns)
            file = (self.folder / name).open("a", buffering=1, newline="")
        self._files[name] = (file, columns)
        csv.DictWriter(file, fieldnames=columns).writerow(dict(line))

    def _open(self, name: str) -> tuple[IO[str], list[str]]:
        path = self.folder / name
        columns = []
        if path.is_file():
            with path.open(newline="", errors="replace") as file:
                columns = next(csv.reader(file), [])
        cut = ends_within_a_line(path)
        writing = path.open("a", buffering=1, newline="")
        writing.write("\n" * cut)
        return writing, columns

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()


def _add_columns(path: Path, columns: list[str]) -> None:
    with path.open(newline="", errors="replace") as file:
        found = list(csv.DictReader(file))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, fieldnames=columns, extrasaction="ignore")
    writer.writeheader()
    writer.writerows(found)
    write_atomically(path, text.getvalue())


def ends_within_a_line(path: Path) -> bool:
    """Whether the last line of a file was cut."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 1))
        return file.read(1) not in (b"", b"\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a `metrics.jsonl`. One that was cut is left out."""
    return list(_parsed(path.read_bytes().splitlines()))


def last_line(path: Path) -> dict[str, Any]:
    """The last complete line of a `metrics.jsonl`; empty if there is none."""
    return next(_parsed(reversed(path.read_bytes().splitlines())), {}) if path.is_file() else {}


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
