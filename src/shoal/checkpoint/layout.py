"""The file layout of a sharded checkpoint: which rank writes which tensor slice, and how any mesh reads it back.

Each rank writes its slices to `rank-N.safetensors`. The file's metadata records the position of each slice in the full
tensor. A reader assembles the slice it needs from whichever files overlap it, so a checkpoint can be loaded on a mesh
of any size.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.checkpoint.snapshot import NAMES, Snapshot, lay_out
from shoal.checkpoint.store import read_manifest
from shoal.mistakes import UserMistake
from shoal.models.tensor_slices import SliceMapping, TensorSlice, local_tensor, whole
from shoal.parallel.placement import Placement

TENSOR_SLICES = "slices"  # key in a file's metadata: the position of each stored slice in its full tensor


@dataclass(frozen=True)
class Entry:
    """A full tensor on disk: its shape, and where its slices are stored."""

    shape: tuple[int, ...]
    slices: tuple[tuple[str, str, TensorSlice], ...]  # file, key in the file, position in the full tensor


@dataclass(frozen=True)
class Part:
    """The slices of a full tensor that this rank holds."""

    tensor: Tensor
    slices: list[SliceMapping]
    full_shape: tuple[int, ...]


def parts_to_write(tensors: Mapping[str, tuple[Tensor, str | None]], placement: Placement) -> dict[str, Part]:
    """Select what this rank writes of `tensors` (each with the name of its parameter, if any).

    Each replicated tensor is written by one of the ranks that hold it, and the load is balanced among them. No
    communication is needed: these ranks see the same tensors in the same order, and so agree on the writer.
    """
    chosen: dict[str, Part] = {}
    loads: dict[tuple[str, ...], list[int]] = {}
    for key, (tensor, parameter) in tensors.items():
        over = placement.replicated_over(parameter, tensor)
        if over is None:
            continue
        replica, count = placement.parallel_dims.replica(over)
        load = loads.setdefault(over, [0] * count)
        writer = load.index(min(load))
        # The size of the full tensor: local shards may differ in size, and ranks would disagree on the load.
        full_shape = placement.whole_shape(parameter, tensor)
        load[writer] += prod(full_shape) * tensor.element_size()
        if writer == replica and (held := placement.slice_mappings(parameter, tensor)):
            chosen[key] = Part(tensor, held, full_shape)
    return chosen


def snapshot_of(parts: Mapping[str, Part]) -> Snapshot:
    """Lay out the file of these parts, with the position of each slice in its metadata."""
    tensor_slices: dict[str, Any] = {}
    stored: dict[str, Tensor] = {}
    for name, part in parts.items():
        local = local_tensor(part.tensor)
        for index, mapping in enumerate(part.slices):
            key = name if index == 0 else f"{name}#{index}"
            stored[key] = local[mapping.local.slices]
            # The dtype is stored a second time: if the one in the header is corrupted to another of the same width,
            # the bytes would silently be read as other values.
            kind = NAMES[stored[key].dtype]
            tensor_slices[key] = {"whole": list(part.full_shape), "offset": list(mapping.whole.offset), "dtype": kind}
    return lay_out(stored, {TENSOR_SLICES: json.dumps(tensor_slices)})


class SliceReader:
    """Reads slices of full tensors from a checkpoint folder, written by any mesh."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, Any] = {}
        checkpoint = read_manifest(folder)
        if checkpoint is None:
            raise UserMistake(f"{folder} is not a complete checkpoint: its MANIFEST.json is missing or invalid.")
        # Only listed files: others have no hash in the manifest.
        for path in sorted(folder / name for name in checkpoint.files if name.endswith(".safetensors")):
            try:
                self._read_table(path)
            except (
                *(SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError),
                *(OverflowError, RecursionError),  # an infinite offset, deeply nested lists
            ):
                raise UserMistake(f"{path} is damaged: its header or slice metadata is invalid.") from None
        for name, entry in self.entries.items():
            if not _fills([tensor_slice for _, _, tensor_slice in entry.slices], entry.shape):
                raise UserMistake(f"{folder} is incomplete: it holds only a part of the tensor {name}.")

    def _read_table(self, path: Path) -> None:
        """Record the slices of a file, and validate its metadata against the shapes and dtypes in its header."""
        file: Any = safe_open(path, framework="pt")
        self._files[path.name] = file
        positions = json.loads(file.metadata()[TENSOR_SLICES])
        if set(positions) != set(file.keys()):
            raise ValueError
        for key, position in positions.items():
            header = file.get_slice(key)
            shape = tuple(header.get_shape())
            tensor_slice = TensorSlice(tuple(map(int, position["offset"])), shape)
            full_shape = tuple(map(int, position["whole"]))
            dimensions = zip(tensor_slice.offset, tensor_slice.shape, full_shape, strict=True)
            if any(offset < 0 or offset + size > limit for offset, size, limit in dimensions):
                raise ValueError
            if header.get_dtype() != position["dtype"]:
                raise ValueError
            name = key.partition("#")[0]  # a rank that holds several slices of a tensor numbers them
            known = self.entries.get(name, Entry(full_shape, ()))
            if known.shape != full_shape:
                raise ValueError
            self.entries[name] = Entry(full_shape, (*known.slices, (path.name, key, tensor_slice)))

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Name (without `prefix`) → full shape of every tensor under `prefix`."""
        return {
            name.removeprefix(prefix): entry.shape for name, entry in self.entries.items() if name.startswith(prefix)
        }

    def read_into(self, name: str, tensor: Tensor, slices: list[SliceMapping]) -> None:
        """Fill `tensor`, which holds these `slices` of the full tensor on this rank."""
        local = local_tensor(tensor)
        for mapping in slices:
            filled = 0
            for file, key, tensor_slice in self.entries[name].slices:
                shared = mapping.whole.overlap(tensor_slice)
                if not shared.empty:
                    view = local[mapping.local.slices][shared.within(mapping.whole).slices]
                    view.copy_(self._part(file, key, shared.within(tensor_slice)))
                    filled += prod(shared.shape)
            if filled != prod(mapping.whole.shape):
                raise UserMistake(f"{self.folder} is incomplete: it holds only a part of the tensor {name}.")

    def read_whole(self, name: str) -> Tensor:
        """Return the full tensor, assembled in host memory."""
        entry = self.entries[name]
        found = [
            (self._part(file, key, whole(tensor_slice.shape)), tensor_slice) for file, key, tensor_slice in entry.slices
        ]
        if len(found) == 1 and found[0][1].shape == entry.shape:
            return found[0][0]
        result = torch.empty(entry.shape, dtype=found[0][0].dtype)
        for stored, tensor_slice in found:
            result[tensor_slice.slices].copy_(stored)
        return result

    def _part(self, file: str, name: str, tensor_slice: TensorSlice) -> Tensor:
        if not tensor_slice.shape:
            scalar: Tensor = self._files[file].get_tensor(name)
            return scalar
        part: Tensor = self._files[file].get_slice(name)[tensor_slice.slices]
        return part


def _fills(tensor_slices: list[TensorSlice], shape: tuple[int, ...]) -> bool:
    """Whether `tensor_slices`, all within bounds of `shape`, cover every element exactly once."""
    if sum(prod(tensor_slice.shape) for tensor_slice in tensor_slices) != prod(shape):
        return False
    ordered = sorted(tensor_slices, key=lambda tensor_slice: tensor_slice.offset)
    for index, tensor_slice in enumerate(ordered):
        # Only slices that begin before this one ends can overlap it; usually there is at most one.
        for after in range(index + 1, len(ordered)):
            other = ordered[after]
            if other.offset[0] >= tensor_slice.offset[0] + tensor_slice.shape[0]:
                break
            if not tensor_slice.overlap(other).empty:
                return False
    return True
