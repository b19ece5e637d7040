"""The layouts of files that hold token ids: nanoGPT's .bin, llm.c's .bin, .npy, and Megatron's .bin with its .idx."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.mistakes import UserMistake

# llm.c and modded-nanogpt: 256 int32, of which the first are magic, version, tokens. Each magic has its data type.
_HEADER_BYTES = 1024
_HEADERS: dict[tuple[int, int], np.dtype] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
_MEGATRON_MAGIC = b"MMIDIDX\x00\x00"
_MEGATRON_HEADER = len(_MEGATRON_MAGIC) + 8 + 1 + 8 + 8
_MEGATRON_TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


@dataclass(frozen=True)
class TokenFile:
    """A stream of tokens in a file. `documents`: where each begins; None: after an end token. `extents`: the parts of
    the stream, each with its first token and its byte offset; None: it is contiguous from `offset`."""

    path: Path
    dtype: np.dtype
    offset: int  # bytes
    tokens: int
    documents: np.ndarray | None = None  # int64
    extents: np.ndarray | None = None  # int64, 2 × parts

    def map(self) -> np.ndarray:
        """The file as tokens, memory-mapped: for `read`."""
        # As a plain array, which is several times faster to slice than a memmap.
        if self.extents is None:
            return np.asarray(np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.tokens,)))
        whole = self.path.stat().st_size // self.dtype.itemsize
        return np.asarray(np.memmap(self.path, self.dtype, mode="r", shape=(whole,)))

    def read(self, mapped: np.ndarray, start: int, end: int) -> np.ndarray:
        """Tokens `start` to `end` of the stream."""
        if self.extents is None:
            return mapped[start:end]
        firsts, places = self.extents[0], self.extents[1] // self.dtype.itemsize
        part = int(np.searchsorted(firsts, start, side="right")) - 1
        found = []
        while start < end:
            after = int(firsts[part + 1]) if part + 1 < len(firsts) else self.tokens
            stop = min(end, after)
            at = int(places[part]) + start - int(firsts[part])
            found.append(mapped[at : at + stop - start])
            start, part = stop, part + 1
        return np.concatenate(found) if found else mapped[:0]


def find_token_files(files: Sequence[Path], dtype: str, vocabulary: int) -> list[TokenFile]:
    """The token files among `files`, without the indexes, which belong to them. `dtype` is that of a file which does
    not tell: auto is the smallest that holds the ids of a vocabulary of this size."""
    plain = np.dtype(("uint16" if vocabulary <= 1 << 16 else "uint32") if dtype == "auto" else dtype).newbyteorder("<")
    found = []
    for file in files:
        if file.suffix.lower() == ".idx":
            continue
        try:
            found.append(_open(file, plain))
        except (OSError, ValueError) as error:
            raise UserMistake(f"{file} cannot be read as tokens ({_reason(error)}).") from error
    return found


def _open(file: Path, plain: np.dtype) -> TokenFile:
    size = file.stat().st_size
    if size == 0:
        raise UserMistake(f"{file} is empty. Remove it.")
    if file.suffix.lower() == ".npy":
        return _open_array(file)
    index = file.with_suffix(".idx")
    if index.is_file():
        return _open_megatron(file, index)
    with file.open("rb") as stream:
        head = np.frombuffer(stream.read(12), dtype="<i4") if size >= _HEADER_BYTES else np.empty(0, "<i4")
    if len(head) == 3 and (int(head[0]), int(head[1])) in _HEADERS:
        dtype = _HEADERS[int(head[0]), int(head[1])]
        present = (size - _HEADER_BYTES) // dtype.itemsize
        if int(head[2]) != present:
            raise UserMistake(
                f"{file} is incomplete: its header says {int(head[2]):,} tokens, but it has {present:,}. Make or "
                "download it again."
            )
        return TokenFile(file, dtype, _HEADER_BYTES, present)
    if size % plain.itemsize:
        raise UserMistake(
            f"{file} has {size:,} bytes, which is not a whole number of {plain.name} tokens. Set data.token_dtype, or "
            "make the file again."
        )
    return TokenFile(file, plain, 0, size // plain.itemsize)


def _open_array(file: Path) -> TokenFile:
    array = np.load(file, mmap_mode="r", allow_pickle=False)
    if not isinstance(array, np.memmap) or array.dtype.kind not in "iu" or array.ndim not in (1, 2):
        described = f"{array.ndim}-dimensional {array.dtype}" if isinstance(array, np.ndarray) else "archive"
        raise UserMistake(
            f"{file} holds a {described} array, but token ids are integers in one dimension, or in two with a document "
            "per row."
        )
    if not array.flags.c_contiguous:
        raise UserMistake(f"{file} is in Fortran order. Save it again with numpy.ascontiguousarray.")
    documents = None if array.ndim == 1 else np.arange(array.shape[0], dtype=np.int64) * array.shape[1]
    return TokenFile(file, array.dtype, int(array.offset), int(array.size), documents)


def _open_megatron(file: Path, index: Path) -> TokenFile:
    data = np.memmap(index, np.uint8, mode="r")
    head = data[:_MEGATRON_HEADER].tobytes()
    if len(head) < _MEGATRON_HEADER or not head.startswith(_MEGATRON_MAGIC):
        raise UserMistake(
            f"{index} is beside {file.name}, but is not an index of Megatron. Remove it, or move it away."
        )
    at = len(_MEGATRON_MAGIC)
    version, code = int.from_bytes(head[at : at + 8], "little"), head[at + 8]
    sequences, boundaries = (int.from_bytes(head[at + 9 + 8 * n : at + 17 + 8 * n], "little") for n in (0, 1))
    if version != 1 or code not in _MEGATRON_TYPES:
        raise UserMistake(
            f"{index} has version {version} and data type {code}, of which shoal reads version 1, integers."
        )
    if len(data) < _MEGATRON_HEADER + 12 * sequences + 8 * boundaries:
        raise UserMistake(f"{index} is incomplete: it ends before its {sequences:,} sequences do. Make it again.")
    dtype = np.dtype(_MEGATRON_TYPES[code])
    at = _MEGATRON_HEADER
    sizes = np.frombuffer(data, "<i4", sequences, at).astype(np.int64)
    pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
    borders = np.frombuffer(data, "<i8", boundaries, at + 12 * sequences)
    held = file.stat().st_size
    if (
        np.any(sizes < 0)
        or np.any(pointers < 0)
        or np.any(pointers % dtype.itemsize)
        or np.any(pointers + sizes * dtype.itemsize > held)
        or np.any(np.diff(borders) < 0)
        or np.any((borders < 0) | (borders > sequences))
    ):
        raise UserMistake(
            f"{index} does not belong to {file.name}: it names tokens that are not there. Make both again."
        )
    ends = np.cumsum(sizes)
    firsts = ends - sizes
    tokens = int(ends[-1]) if sequences else 0
    documents = np.unique(np.append(firsts, tokens)[borders])
    documents = documents[documents < tokens]
    if sequences == 0 or np.array_equal(pointers, pointers[0] + firsts * dtype.itemsize):
        return TokenFile(file, dtype, int(pointers[0]) if sequences else 0, tokens, documents)
    filled = sizes > 0
    return TokenFile(file, dtype, 0, tokens, documents, np.stack([firsts[filled], pointers[filled]]))


def _reason(error: Exception) -> str:
    known = error.strerror if isinstance(error, OSError) else None
    return known or (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
