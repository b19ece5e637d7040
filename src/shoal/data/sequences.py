"""Prepared sequences: memory-mapped arrays on disk, and a writer that does not hold them in memory."""

import hashlib
import json
import threading
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import numpy as np

LOSS_TOKEN = 1  # flag: the loss counts this token as a label
DOCUMENT = 2  # flag: the first token of a document, and therefore never a loss token
DESIRABLE = 4  # flag, beside DOCUMENT: the answer of the document has the label true

DOCUMENT_LENGTHS = "document_lengths.npy"
LABELS = "labels.npy"  # the class of each sequence
VALUES = "values.npy"  # a number for each token
_DETERMINE_SEQUENCES = ("tokens.npy", "flags.npy", "starts.npy", "ends.npy")


@dataclass(frozen=True)
class Summary:
    """The statistics of a preparation. Documents longer than the maximum length were `truncated`, `split`, or left out
    (`too_long`). `dropped`: documents or sequences without a loss token, left out."""

    format: str
    joined: bool  # documents follow each other in one stream
    separate: bool  # sequences hold several documents that must not attend to each other
    documents: int
    tokens: int  # of all documents, end tokens included
    sequences: int
    longest: int  # inputs of the longest sequence
    loss_tokens: int
    loss_token_share: float  # of the labels, padding not counted
    content: str  # a hash of the sequences: the same wherever their files are and whenever they were written
    filled: float | None = None  # share of the inputs of full sequences that hold a token; None: not packed
    truncated: int = 0
    split: int = 0
    too_long: int = 0
    dropped: int = 0
    empty: int = 0
    skipped: int = 0
    first_skipped: str | None = None
    pairs: bool = False  # documents are chosen and rejected answers in turn, counted in pairs where they are left out
    encoder: bool = False  # for an encoder: loss tokens are those that may be masked
    classes: list[str] | None = None  # the names of the classes, by their numbers; None: examples have none
    desirable: int | None = None  # documents with the label true; None: they have no labels

    @property
    def mean_length(self) -> float:
        """Inputs per sequence, without padding."""
        return self.loss_tokens / self.loss_token_share / self.sequences

    @property
    def mean_loss_tokens(self) -> float:
        return self.loss_tokens / self.sequences

    @property
    def unit(self) -> str:
        return "pairs" if self.pairs else "cells" if self.format == "cells" else "documents"

    @property
    def units(self) -> int:
        return self.documents // 2 if self.pairs else self.documents

    def sentences(self) -> list[str]:
        """The summary for a person: the first sentence says what there is, the others what was left out."""
        if self.format == "cells":
            return self._sentences_about_cells()
        sequences = f"{self.sequences:,} sequence{'s' if self.sequences != 1 else ''}"
        if self.filled is not None:
            sequences = f"packed into {sequences}, {self.filled:.1%} full"
        kind = self.format
        if self.desirable is not None:
            kind += f", {self.desirable:,} desirable"
        counted = f"{self.loss_token_share:.0%} of tokens count in the loss"
        if self.encoder:
            counted = f"{self.mean_length:,.0f} tokens each"
        if self.classes is not None:
            counted += f", {len(self.classes):,} classes"
        unit = self.unit.removesuffix("s") if self.units == 1 else self.unit
        said = [f"{self.units:,} {unit} ({kind}), {self.tokens:,} tokens, {sequences}; {counted}."]
        left = "pairs" if self.pairs else "documents or sequences"
        if self.truncated:
            said.append(f"{self.truncated:,} {self.unit} are longer than data.max_length and were truncated.")
        if self.split:
            said.append(f"{self.split:,} documents are longer than data.max_length and were split into sequences.")
        if self.too_long:
            said.append(f"{self.too_long:,} {self.unit} are longer than data.max_length and were left out.")
        if self.dropped:
            said.append(f"{self.dropped:,} {left} have no loss tokens and were left out.")
        if self.empty:
            said.append(f"{self.empty:,} documents are empty and were left out.")
        if self.skipped:
            said.append(f"{self.skipped:,} invalid records or files were skipped; the first: {self.first_skipped}")
        return said

    def _sentences_about_cells(self) -> list[str]:
        classes = "" if self.classes is None else f", {len(self.classes):,} classes"
        said = [f"{self.documents:,} cells, {self.tokens:,} tokens, {self.mean_length:,.0f} per cell{classes}."]
        if self.truncated:
            said.append(
                f"{self.truncated:,} cells express more genes than fit: those with the highest expression stay "
                "(data.cells.max_genes, data.max_length)."
            )
        if self.dropped:
            said.append(f"{self.dropped:,} cells have too few genes or no label and were left out.")
        if self.empty:
            said.append(f"{self.empty:,} cells express no gene of the vocabulary and were left out.")
        return said


class Sequences(ABC):
    """Numbered sequences of tokens, read lazily."""

    summary: Summary

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens and flags of one sequence."""

    @abstractmethod
    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """The number of tokens of each of these sequences."""

    @abstractmethod
    def loss_tokens(self, indices: np.ndarray) -> np.ndarray:
        """How many labels of each of these sequences the loss counts."""

    def labels(self, indices: np.ndarray) -> np.ndarray:
        """The number of the class of each of these sequences."""
        raise TypeError("these sequences have no classes")

    def values(self, index: int) -> np.ndarray | None:
        """A number for each token of one sequence, such as its binned expression; None: there are none."""
        return None

    @property
    def separate(self) -> bool:
        return self.summary.separate


@dataclass(frozen=True)
class StoredSequences(Sequences):
    """Sequence k is `tokens[starts[k]:ends[k]]`; neighbours may share a token. The arrays are memory-mapped."""

    tokens: np.ndarray
    flags: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    counted: np.ndarray  # loss tokens of each sequence
    summary: Summary
    documents: np.ndarray | None = None  # tokens of each document before it was truncated or split, in source order
    classes: np.ndarray | None = None  # the number of the class of each sequence
    token_values: np.ndarray | None = None  # beside `tokens`

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        start, end = int(self.starts[index]), int(self.ends[index])
        return self.tokens[start:end], self.flags[start:end]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.ends[indices] - self.starts[indices]
        return found

    def loss_tokens(self, indices: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.counted[indices]
        return found

    def labels(self, indices: np.ndarray) -> np.ndarray:
        if self.classes is None:
            return super().labels(indices)
        found: np.ndarray = self.classes[indices]
        return found

    def values(self, index: int) -> np.ndarray | None:
        if self.token_values is None:
            return None
        return self.token_values[int(self.starts[index]) : int(self.ends[index])]


def open_sequences(folder: Path) -> StoredSequences:
    """The sequences in `folder`, memory-mapped."""
    tokens, flags, starts, ends, counted = (
        load_array(folder / f"{name}.npy") for name in ("tokens", "flags", "starts", "ends", "loss_tokens")
    )
    summary = Summary(**json.loads((folder / "summary.json").read_text()))
    documents, classes, values = (
        load_array(folder / name) if (folder / name).exists() else None for name in (DOCUMENT_LENGTHS, LABELS, VALUES)
    )
    return StoredSequences(tokens, flags, starts, ends, counted, summary, documents, classes, values)


_header = threading.Lock()


def load_array(path: Path) -> np.ndarray:
    """A `.npy` file, memory-mapped."""
    # numpy parses the header with `ast`, which in Python 3.11 fails in two threads at once.
    with _header:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    return np.asarray(mapped)  # a plain array: to slice a numpy.memmap takes several times as long


def hash_sequences(folder: Path) -> str:
    """A hash of the sequences in `folder`. It reads all of them: computed once, when they are prepared."""
    with ThreadPoolExecutor() as pool:
        optional = [name for name in (LABELS, VALUES) if (folder / name).exists()]
        digests = pool.map(_hash_file, [folder / name for name in (*_DETERMINE_SEQUENCES, *optional)])
        return hashlib.sha256(b"".join(digests)).hexdigest()


def _hash_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def write_summary(folder: Path, summary: Summary) -> None:
    (folder / "summary.json").write_text(json.dumps(asdict(summary), indent=2) + "\n")


class ArrayWriter:
    """A one-dimensional `.npy` file that grows. Its header is written last, into reserved space."""

    _HEADER = 128

    def __init__(self, path: Path, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.length = 0
        self._file = path.open("wb")
        self._file.write(bytes(self._HEADER))

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).data)
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
        self._file.close()

    def __enter__(self) -> "ArrayWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()  # without a header no reader takes it for a complete array


def write_array(path: Path, values: np.ndarray) -> None:
    with ArrayWriter(path, values.dtype) as writer:
        writer.append(values)
