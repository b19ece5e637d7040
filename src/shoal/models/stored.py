"""Tensors in the safetensors files of a folder, read one slice at a time.

A tensor of the model is one tensor of a file, or is assembled from several, for example one per expert. `read` touches
only those stored tensors, and only those rows of them, that overlap the requested slice.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.mistakes import UserMistake
from shoal.models.tensor_slices import TensorSlice, with_value

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
ROWS_PER_CHUNK = 4096


class Stored(Protocol):
    """A tensor that is not in memory."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        """The values of `tensor_slice`, on the CPU, in the dtype of the files."""
        ...


@dataclass
class Folder:
    """The safetensors files of a folder. Each is opened once, on first use."""

    path: Path
    files: dict[str, str]  # by the tensor's name
    opened: dict[str, Any] = field(default_factory=dict)

    def file_of(self, name: str) -> Path:
        return self.path / self.files[name]

    def open(self, name: str) -> Any:
        """The file that holds the tensor `name`."""
        file = self.files[name]
        if file not in self.opened:
            try:
                self.opened[file] = safe_open(self.path / file, framework="pt")
            except SafetensorError as error:
                raise UserMistake(f"{self.path / file} is damaged: {error}") from None
        return self.opened[file]

    def find(self, name: str) -> "InFile":
        """The tensor `name`. Reads the header only."""
        try:
            header = self.open(name).get_slice(name)
        except SafetensorError as error:
            raise UserMistake(f"{self.file_of(name)} is damaged: {error}") from None
        kind = header.get_dtype()
        if kind not in DTYPES:
            raise UserMistake(
                f"{self.file_of(name)} holds {name} as {kind}: quantized weights cannot be trained; use the originals."
            )
        return InFile(self, name, tuple(header.get_shape()), DTYPES[kind])


def open_folder(path: Path) -> Folder:
    """The files of a Hugging Face folder, as its index or its only file lists them."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            table = json.loads(index.read_text())["weight_map"]
            files = {str(name): str(file) for name, file in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserMistake(f"{index} is not a safetensors index.") from None
        for file in sorted(set(files.values())):
            if Path(file).name != file or not (path / file).is_file():
                raise UserMistake(f"{index} names {file}, which is not a file of that folder.")
        return Folder(path, files)
    single = path / "model.safetensors"
    if not single.is_file():
        found = ", ".join(sorted(other.name for other in path.glob("*.bin"))[:2])
        note = f" ({found} is a pickle, which shoal does not read)" if found else ""
        raise UserMistake(f"{path} holds no model.safetensors{note}; save it with save_pretrained.")
    try:
        opened: Any = safe_open(single, framework="pt")
        return Folder(path, dict.fromkeys(opened.keys(), single.name), {single.name: opened})
    except SafetensorError as error:
        raise UserMistake(f"{single} is damaged: {error}") from None


@dataclass(frozen=True)
class InFile:
    """One tensor of a file."""

    folder: Folder
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        if tensor_slice.empty:
            return torch.empty(tensor_slice.shape, dtype=self.dtype)
        opened = self.folder.open(self.name)
        # safetensors cannot slice a tensor without dimensions.
        found: Tensor = (
            opened.get_slice(self.name)[tensor_slice.slices] if tensor_slice.shape else opened.get_tensor(self.name)
        )
        return found


@dataclass(frozen=True)
class InMemory:
    """A tensor that is in memory, or memory-mapped until it is read."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        # A copy: safetensors refuses tensors that share storage, such as slices of a fused tensor.
        return self.tensor[tensor_slice.slices].clone()


@dataclass(frozen=True)
class Stacked:
    """Tensors of one shape, stacked along a new dimension."""

    parts: Sequence[Stored]
    dimension: int

    @property
    def shape(self) -> tuple[int, ...]:
        inner = self.parts[0].shape
        return (*inner[: self.dimension], len(self.parts), *inner[self.dimension :])

    @property
    def dtype(self) -> torch.dtype:
        return common_dtype(self.parts)

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        found = torch.empty(tensor_slice.shape, dtype=self.dtype)
        if tensor_slice.empty:
            return found
        inner = TensorSlice(_without(tensor_slice.offset, self.dimension), _without(tensor_slice.shape, self.dimension))
        first = tensor_slice.offset[self.dimension]
        for index in range(tensor_slice.shape[self.dimension]):
            found.select(self.dimension, index).copy_(self.parts[first + index].read(inner))
        return found


@dataclass(frozen=True)
class Concatenated:
    """Tensors concatenated along an existing dimension."""

    parts: Sequence[Stored]
    dimension: int

    @property
    def shape(self) -> tuple[int, ...]:
        length = sum(part.shape[self.dimension] for part in self.parts)
        return with_value(self.parts[0].shape, self.dimension, length)

    @property
    def dtype(self) -> torch.dtype:
        return common_dtype(self.parts)

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        found = torch.empty(tensor_slice.shape, dtype=self.dtype)
        start = 0
        for part in self.parts:
            held = TensorSlice(with_value((0,) * len(part.shape), self.dimension, start), part.shape)
            shared = tensor_slice.overlap(held)
            if not shared.empty:
                found[shared.within(tensor_slice).slices] = part.read(shared.within(held))
            start += part.shape[self.dimension]
        return found


@dataclass(frozen=True)
class Sliced:
    """A slice of another tensor, as a tensor of its own."""

    whole: Stored
    within: TensorSlice

    @property
    def shape(self) -> tuple[int, ...]:
        return self.within.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        offset = tuple(one + other for one, other in zip(self.within.offset, tensor_slice.offset, strict=True))
        return self.whole.read(TensorSlice(offset, tensor_slice.shape))


def common_dtype(parts: Iterable[Stored]) -> torch.dtype:
    """The promoted dtype of all parts; files may mix dtypes."""
    first, *others = [part.dtype for part in parts]
    for other in others:
        first = torch.promote_types(first, other)
    return first


def equal_values(one: Stored, other: Stored) -> bool:
    """Whether two tensors are equal. Read in chunks of rows: an embedding may be the largest tensor of the model."""
    if one.shape != other.shape or not one.shape:
        return False
    inner = one.shape[1:]
    for start in range(0, one.shape[0], ROWS_PER_CHUNK):
        count = min(ROWS_PER_CHUNK, one.shape[0] - start)
        tensor_slice = TensorSlice((start, *(0 for _ in inner)), (count, *inner))
        if not torch.equal(one.read(tensor_slice), other.read(tensor_slice)):
            return False
    return True


def _without(values: tuple[int, ...], index: int) -> tuple[int, ...]:
    return (*values[:index], *values[index + 1 :])
