"""Metric sinks. `metrics.jsonl` always, one object per line, append-only; others as `log.to` says."""

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

Line = Mapping[str, float | int | None]


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
        self._unwritten = b"\n" if _ends_within_a_line(path) else b""

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
    """Training metrics in `metrics.csv`, evaluation metrics in `evaluation.csv`: their columns differ."""

    name = "metrics.csv"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, tuple[IO[str], Any]] = {}

    def write(self, line: Line) -> None:
        name = "evaluation.csv" if "eval_loss" in line else "metrics.csv"
        if name not in self._files:
            path = self.folder / name
            new = not path.exists() or not path.stat().st_size
            cut = _ends_within_a_line(path)
            file = path.open("a", buffering=1, newline="")
            file.write("\n" * cut)
            writer = csv.DictWriter(file, fieldnames=list(line), extrasaction="ignore")
            if new:
                writer.writeheader()
            self._files[name] = (file, writer)
        self._files[name][1].writerow(dict(line))

    def close(self) -> None:
        for file, _ in self._files.values():
            file.close()


class TensorBoard:
    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def write(self, line: Line) -> None:
        step = line["step"]
        for name, value in line.items():
            if name not in ("step", "attempt") and value is not None:
                group = "eval" if name.startswith("eval_") else "train"
                self._writer.add_scalar(f"{group}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


def open_sinks(names: Sequence[str], run: Path) -> list[Sink]:
    """The sinks of `log.to`, and `metrics.jsonl`."""
    sinks: list[Sink] = [JsonLines(run / "metrics.jsonl")]
    for name in names:
        if name == "tensorboard":
            sinks.append(TensorBoard(run / "logs" / "tensorboard"))
        elif name == "csv":
            sinks.append(Csv(run))
    return sinks


def _ends_within_a_line(path: Path) -> bool:
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
