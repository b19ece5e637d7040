"""Metric sinks. `metrics.jsonl` always, one object per line, append-only; others as `log.to` says."""

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

Line = Mapping[str, float | int | None]


class Sink(Protocol):
    name: str

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Writes each line in one call, so that a killed run leaves complete lines.

    Lines that a full disk rejects are kept in memory and written with the next line.
    """

    name = "metrics.jsonl"

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)
        self._unwritten = b""

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
            new = not path.exists()
            file = path.open("a", buffering=1, newline="")
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


def last_line(path: Path) -> dict[str, Any]:
    """The last complete line of a `metrics.jsonl`; empty if there is none."""
    if not path.is_file():
        return {}
    for text in reversed(path.read_text().splitlines()):
        try:
            found: dict[str, Any] = json.loads(text)
        except ValueError:
            continue
        return found
    return {}
