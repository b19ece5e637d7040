"""Who holds which piece of which tensor: how ranks divide the writing, and how any mesh reads it back.

Each rank writes `rank-N.safetensors` with its pieces; the file's metadata says which box of which whole tensor each
piece is. A reader puts the pieces together over the box it wants, so the world size that wrote does not matter.
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

TENSOR_SLICES = "slices"  # in a file's metadata: where each of its tensors stands in the whole one


@dataclass(frozen=True)
class Entry:
    """A whole tensor on disk: its shape, and where boxes of it are."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[str, str, TensorSlice], ...]  # file, name there, which part of the whole


@dataclass(frozen=True)
class Part:
    """What this rank has of a whole tensor."""

    tensor: Tensor
    pieces: list[SliceMapping]
    whole: tuple[int, ...]


def parts_to_write(tensors: Mapping[str, tuple[Tensor, str | None]], placement: Placement) -> dict[str, Part]:
    """What this rank writes of `tensors` (each with the parameter it belongs to, if to any).

    What several ranks have, one of them writes, and they share the work: all that have a tensor see the same ones in
    the same order, and so agree on the writer.
    """
    chosen: dict[str, Part] = {}
    loads: dict[tuple[str, ...], list[int]] = {}
    for key, (tensor, parameter) in tensors.items():
        over = placement.shared_over(parameter, tensor)
        if over is None:
            continue
        number, count = placement.parallel_dims.replica(over)
        load = loads.setdefault(over, [0] * count)
        writer = load.index(min(load))
        # Of the whole: parts of it may differ in size, and with them what ranks think of each other's load.
        whole_size = placement.whole_shape(parameter, tensor)
        load[writer] += prod(whole_size) * tensor.element_size()
        if writer == number and (held := placement.pieces(parameter, tensor)):
            chosen[key] = Part(tensor, held, whole_size)
    return chosen


def snapshot_of(parts: Mapping[str, Part]) -> Snapshot:
    """The file that holds these parts, and says of each which box of which whole tensor it is."""
    tensor_slices: dict[str, Any] = {}
    stored: dict[str, Tensor] = {}
    for name, part in parts.items():
        local = local_tensor(part.tensor)
        for index, piece in enumerate(part.pieces):
            key = name if index == 0 else f"{name}#{index}"
            stored[key] = local[piece.local.slices]
            # The type as well: the header's is one word, and with another one of its length the same bytes would be
            # other numbers.
            kind = NAMES[stored[key].dtype]
            tensor_slices[key] = {"whole": list(part.whole), "offset": list(piece.whole.offset), "dtype": kind}
    return lay_out(stored, {TENSOR_SLICES: json.dumps(tensor_slices)})


class SliceReader:
    """Reads boxes of whole tensors from a checkpoint's folder, whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, Any] = {}
        checkpoint = read_manifest(folder)
        if checkpoint is None:
            raise UserMistake(f"{folder} is not a whole checkpoint: its MANIFEST.json is missing or wrong.")
        # What is not listed has not been hashed, whoever put it there.
        for path in sorted(folder / name for name in checkpoint.files if name.endswith(".safetensors")):
            try:
                self._read_table(path)
            except (
                *(SafetensorError, OSError, ValueError, KeyError, TypeError, AttributeError),
                *(OverflowError, RecursionError),  # an infinite offset, lists in lists in lists
            ):
                raise UserMistake(f"{path} is damaged: it does not say which tensors it holds.") from None
        for name, entry in self.entries.items():
            if not _fills([tensor_slice for _, _, tensor_slice in entry.pieces], entry.shape):
                raise UserMistake(f"{folder} holds only a part of {name}: it was not written whole.")

    def _read_table(self, path: Path) -> None:
        """Take note of what a file holds, trusting nothing in it that the shapes of its tensors do not bear out."""
        file: Any = safe_open(path, framework="pt")
        self._files[path.name] = file
        places = json.loads(file.metadata()[TENSOR_SLICES])
        if set(places) != set(file.keys()):
            raise ValueError
        for key, place in places.items():
            header = file.get_slice(key)
            shape = tuple(header.get_shape())
            tensor_slice, whole_shape = (
                TensorSlice(tuple(map(int, place["offset"])), shape),
                tuple(map(int, place["whole"])),
            )
            ends = zip(tensor_slice.offset, tensor_slice.shape, whole_shape, strict=True)
            if any(offset < 0 or offset + size > limit for offset, size, limit in ends):
                raise ValueError
            if header.get_dtype() != place["dtype"]:
                raise ValueError
            name = key.partition("#")[0]  # a rank that has several boxes of a tensor numbers them
            known = self.entries.get(name, Entry(whole_shape, ()))
            if known.shape != whole_shape:
                raise ValueError
            self.entries[name] = Entry(whole_shape, (*known.pieces, (path.name, key, tensor_slice)))

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Name (without `prefix`) → whole shape of every tensor under `prefix`."""
        return {
            name.removeprefix(prefix): entry.shape for name, entry in self.entries.items() if name.startswith(prefix)
        }

    def read_into(self, name: str, tensor: Tensor, pieces: list[SliceMapping]) -> None:
        """Fill the `pieces` of the whole that `tensor` holds on this rank."""
        local = local_tensor(tensor)
        for piece in pieces:
            filled = 0
            for file, key, tensor_slice in self.entries[name].pieces:
                shared = piece.whole.overlap(tensor_slice)
                if not shared.empty:
                    place = local[piece.local.slices][shared.within(piece.whole).slices]
                    place.copy_(self._part(file, key, shared.within(tensor_slice)))
                    filled += prod(shared.shape)
            if filled != prod(piece.whole.shape):
                raise UserMistake(f"{self.folder} holds only a part of {name}: it was not written whole.")

    def read_whole(self, name: str) -> Tensor:
        """The whole tensor, put together on the host."""
        entry = self.entries[name]
        found = [
            (self._part(file, key, whole(tensor_slice.shape)), tensor_slice) for file, key, tensor_slice in entry.pieces
        ]
        if len(found) == 1 and found[0][1].shape == entry.shape:
            return found[0][0]
        result = torch.empty(entry.shape, dtype=found[0][0].dtype)
        for piece, tensor_slice in found:
            result[tensor_slice.slices].copy_(piece)
        return result

    def _part(self, file: str, name: str, tensor_slice: TensorSlice) -> Tensor:
        if not tensor_slice.shape:
            scalar: Tensor = self._files[file].get_tensor(name)
            return scalar
        part: Tensor = self._files[file].get_slice(name)[tensor_slice.slices]
        return part


def _fills(tensor_slices: list[TensorSlice], shape: tuple[int, ...]) -> bool:
    """Whether `tensor_slices`, all inside a whole of this shape, hold every element of it, and none twice."""
    if sum(prod(tensor_slice.shape) for tensor_slice in tensor_slices) != prod(shape):
        return False
    ordered = sorted(tensor_slices, key=lambda tensor_slice: tensor_slice.offset)
    for index, tensor_slice in enumerate(ordered):
        # Only those that begin before this one ends: of many shards of a tensor, that is hardly ever more than one.
        for after in range(index + 1, len(ordered)):
            other = ordered[after]
            if other.offset[0] >= tensor_slice.offset[0] + tensor_slice.shape[0]:
                break
            if not tensor_slice.overlap(other).empty:
                return False
    return True
