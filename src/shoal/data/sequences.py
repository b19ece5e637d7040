"""Prepared rows: memory-mapped arrays on disk, and how they are written without holding them in memory."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

TARGET = 1  # flag: this token is a training target
DOCUMENT = 2  # flag: this token is the first of a document, and therefore never a target


@dataclass(frozen=True)
class Summary:
    """What preparation found and did. `dropped`: documents or rows without a single target, left out."""

    format: str
    separate: bool  # rows hold several documents that must not see each other
    documents: int
    tokens: int  # of all documents, end tokens included
    rows: int
    longest: int  # inputs of the longest row
    loss_tokens: int
    loss_token_share: float  # of the labels, padding not counted
    truncated: int = 0
    dropped: int = 0
    empty: int = 0
    skipped: int = 0
    first_skipped: str | None = None

    def sentences(self) -> list[str]:
        """What a person should know before training on this; the first is the result, the others what was lost."""
        said = [
            f"{self.documents:,} documents ({self.format}), {self.tokens:,} tokens, {self.rows:,} rows; "
            f"{self.loss_token_share:.0%} of the labels are trained on."
        ]
        if self.truncated:
            said.append(f"{self.truncated:,} documents are longer than data.max_length and lost their tail.")
        if self.dropped:
            said.append(f"{self.dropped:,} documents or rows have nothing to train on and were left out.")
        if self.empty:
            said.append(f"{self.empty:,} documents are empty and were left out.")
        if self.skipped:
            said.append(f"{self.skipped:,} bad rows or files were skipped; the first: {self.first_skipped}")
        return said


@dataclass(frozen=True)
class Sequences:
    """Row k is `tokens[starts[k]:ends[k]]`; neighbours may share a token. Nothing is read until it is asked for."""

    tokens: np.ndarray
    flags: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    loss_tokens: np.ndarray  # per row: how many of its labels are trained on
    summary: Summary

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and flags of one row."""
        start, end = int(self.starts[row]), int(self.ends[row])
        return self.tokens[start:end], self.flags[start:end]

    @property
    def separate(self) -> bool:
        return self.summary.separate


def open_sequences(folder: Path) -> Sequences:
    """The rows written in `folder`, memory-mapped."""
    arrays = {
        name: np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        for name in ("tokens", "flags", "starts", "ends", "loss_tokens")
    }
    return Sequences(**arrays, summary=Summary(**json.loads((folder / "summary.json").read_text())))


def write_summary(folder: Path, summary: Summary) -> None:
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")


class ArrayWriter:
    """A one-dimensional `.npy` file that grows. Its header is written last, into room kept for it."""

    _HEADER = 128

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.length = 0
        self._file = path.open("wb")
        self._file.write(bytes(self._HEADER))

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.length += len(values)

    def close(self) -> None:
        description = {
            "descr": np.lib.format.dtype_to_descr(self.dtype),
            "fortran_order": False,
            "shape": (self.length,),
        }
        magic = np.lib.format.magic(1, 0)
        room = self._HEADER - len(magic) - 2
        text = repr(description).encode().ljust(room - 1) + b"\n"
        assert len(text) == room
        self._file.seek(0)
        self._file.write(magic + room.to_bytes(2, "little") + text)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()  # without a header it cannot be taken for a whole array


def write_array(path: Path, values: np.ndarray) -> None:
    with ArrayWriter(path, values.dtype) as writer:
        writer.append(values)
