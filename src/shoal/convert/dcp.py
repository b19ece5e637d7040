"""Reads the tensors of a checkpoint of torch.distributed.checkpoint (DCP), which FSDP, torchtitan and others write.

Its index `.metadata` is a pickle: it is read as records, and nothing in it is run. Each chunk of a tensor is a file of
torch.save inside a `.distcp` file, loaded with `weights_only=True`. Values are read when they are used.
"""

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.convert.pickle_records import Record, read_records
from shoal.mistakes import UserMistake
from shoal.models.stored import Stored
from shoal.models.tensor_slices import TensorSlice

INDEX = ".metadata"
MODULE = "torch.distributed.checkpoint"
# Blocks of a training state that hold the model, and those that do not.
MODEL_KEYS = ("model", "module", "state_dict", "model_state_dict")
OTHERS = ("optim", "lr_scheduler", "dataloader", "train_state", "scheduler", "rng")


@dataclass(frozen=True)
class Chunk:
    """A slice of a tensor, and where it is."""

    file: Path
    start: int
    length: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def read(self) -> Tensor:
        try:
            with self.file.open("rb") as opened:
                opened.seek(self.start)
                data = opened.read(self.length)
            loaded = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except OSError as error:
            raise UserMistake(f"{self.file} cannot be read: {error.strerror}.") from None
        except Exception:  # a damaged file can make the unpickler raise anything
            raise UserMistake(f"{self.file} is damaged, or holds more than tensors; copy it again.") from None
        if not isinstance(loaded, Tensor) or tuple(loaded.shape) != self.sizes:
            raise UserMistake(f"{self.file} does not hold what the index {INDEX} says; copy the folder again.")
        return loaded


@dataclass(frozen=True)
class Assembled:
    """A tensor of several chunks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        whole = torch.empty(self.shape, dtype=self.dtype)
        for chunk in self.chunks:
            where = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[where] = chunk.read()
        return whole[tensor_slice.slices] if tensor_slice.shape else whole


def is_dcp(folder: Path) -> bool:
    return (folder / INDEX).is_file() or any(folder.glob("*.distcp"))


def read_dcp(folder: Path) -> dict[str, Stored]:
    """The tensors of the model in a DCP folder, by name. No values are read yet."""
    file = folder / INDEX
    if not file.is_file():
        raise UserMistake(f"{folder} holds .distcp files but no {INDEX}, their index; copy it too.")
    index = read_records(file.read_bytes(), str(file))
    if not isinstance(index, Record) or not index.name.startswith(MODULE) or not isinstance(index.state, dict):
        raise UserMistake(f"{file} is not an index of {MODULE}.")
    places = _places(folder, index)
    paths = index.get("planner_data") or {}
    described = {str(name): one for name, one in (index.get("state_dict_metadata") or {}).items()}
    tensors = {
        name: one for name, one in described.items() if isinstance(one, Record) and one.get("chunks") is not None
    }
    return {ours: _assembled(folder, name, tensors[name], places) for ours, name in _of_model(tensors, paths).items()}


def _of_model(tensors: dict[str, Record], paths: Any) -> dict[str, str]:
    """The names of the model's tensors without the blocks around them, and as they are in the index."""
    found: dict[str, str] = {}
    for name in tensors:
        path = paths.get(name) if isinstance(paths, dict) else None
        parts = [str(part) for part in path] if isinstance(path, tuple | list) else [name]
        while len(parts) > 1 and parts[0] in ("app", "state"):
            parts = parts[1:]
        if parts[0].startswith(OTHERS):
            continue
        if len(parts) > 1 and parts[0] in MODEL_KEYS:
            parts = parts[1:]
        found[".".join(parts)] = name
    return found


def _places(folder: Path, index: Record) -> dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]]:
    found: dict[tuple[str, tuple[int, ...]], tuple[Path, int, int]] = {}
    for key, info in (index.get("storage_data") or {}).items():
        name, file = str(key.get("fqn")), str(info.get("relative_path"))
        if info.get("transform_descriptors"):
            raise UserMistake(
                f"{folder} is compressed ({info.get('transform_descriptors')[0]}); save it without compression."
            )
        if Path(file).name != file or not (folder / file).is_file():
            raise UserMistake(f"{folder / INDEX} names {file}, which is not a file of that folder; copy it there.")
        found[name, _size(key.get("offset") or ())] = (folder / file, int(info.get("offset")), int(info.get("length")))
    return found


def _assembled(folder: Path, name: str, described: Record, places: dict[Any, tuple[Path, int, int]]) -> Assembled:
    shape = _size(described.get("size"))
    chunks = []
    for chunk in described.get("chunks"):
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if (name, offsets) not in places:
            raise UserMistake(f"{folder / INDEX} does not say where a part of {name} is; copy the folder again.")
        chunks.append(Chunk(*places[name, offsets], offsets, sizes))
    if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(shape):
        raise UserMistake(f"{folder} holds only a part of {name}; copy the files of all ranks.")
    return Assembled(shape, _dtype(folder, name, described), tuple(chunks))


def _size(value: Any) -> tuple[int, ...]:
    """A torch.Size, which is a record of a tuple."""
    if isinstance(value, Record):
        value = value.arguments[0] if value.arguments else ()
    return tuple(int(one) for one in value)


def _dtype(folder: Path, name: str, described: Record) -> torch.dtype:
    properties = described.get("properties")
    state = properties.state if isinstance(properties, Record) else None
    kind = state[0] if isinstance(state, tuple) and state else None
    dtype = getattr(torch, kind.name.removeprefix("torch."), None) if isinstance(kind, Record) else None
    if not isinstance(dtype, torch.dtype):
        raise UserMistake(f"{folder} holds {name} in a dtype that its index does not name.")
    return dtype
