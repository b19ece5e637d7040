"""Who holds which piece of which tensor: how ranks divide the writing, and how any mesh reads it back.

Each rank writes `rank-N.safetensors` with its pieces and `rank-N.json` that says which box of which whole tensor each
piece is. A reader puts the pieces together over the box it wants, so the world size that wrote does not matter.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from shoal.models.pieces import Box, local_box, local_tensor, whole


@dataclass(frozen=True)
class Entry:
    """A whole tensor on disk: its shape, and for each file the box of it that is there."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[str, Box], ...]


def own_pieces(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """The tensors of which this rank writes a piece: its shards, and its share of what every rank has whole."""
    chosen: dict[str, Tensor] = {}
    load = [0] * world_size
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            coordinate = tensor.device_mesh.get_coordinate()
            assert coordinate is not None, "this rank is in the mesh of its own tensors"
            copies = [c for c, place in zip(coordinate, tensor.placements, strict=True) if isinstance(place, Replicate)]
            if not any(copies) and not local_box(tensor).empty:
                chosen[name] = tensor
        else:  # the same on all ranks, which all see the same order and so agree on the writer
            writer = load.index(min(load))
            load[writer] += tensor.numel() * tensor.element_size()
            if writer == rank:
                chosen[name] = tensor
    return chosen


def write_pieces(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> list[Path]:
    """Write this rank's pieces and their table; returns the files written."""
    data, table = folder / f"rank-{rank:05d}.safetensors", folder / f"rank-{rank:05d}.json"
    boxes: dict[str, Any] = {}
    for name, tensor in tensors.items():
        box = local_box(tensor)
        boxes[name] = {"whole": list(tensor.shape), "offset": list(box.offset), "shape": list(box.shape)}
    save_file({name: local_tensor(tensor).contiguous().cpu() for name, tensor in tensors.items()}, data)
    table.write_text(json.dumps(boxes))
    return [data, table]


class PieceReader:
    """Reads boxes of whole tensors from a checkpoint's folder, whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("rank-*.json")):
            for name, place in json.loads(path.read_text()).items():
                box = Box(tuple(place["offset"]), tuple(place["shape"]))
                known = self.entries.get(name)
                pieces = (*(known.pieces if known else ()), (path.with_suffix(".safetensors").name, box))
                self.entries[name] = Entry(tuple(place["whole"]), pieces)

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Name (without `prefix`) → whole shape of every tensor under `prefix`."""
        return {
            name.removeprefix(prefix): entry.shape for name, entry in self.entries.items() if name.startswith(prefix)
        }

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill this rank's part of `tensor`."""
        local, wanted = local_tensor(tensor), local_box(tensor)
        for file, box in self.entries[name].pieces:
            shared = wanted.overlap(box)
            if not shared.empty:
                local[shared.within(wanted).slices].copy_(self._part(file, name, shared.within(box)))

    def read_whole(self, name: str) -> Tensor:
        """The whole tensor, put together on the host."""
        entry = self.entries[name]
        pieces = [(self._part(file, name, whole(box.shape)), box) for file, box in entry.pieces]
        if len(pieces) == 1 and pieces[0][1].shape == entry.shape:
            return pieces[0][0]
        result = torch.empty(entry.shape, dtype=pieces[0][0].dtype)
        for piece, box in pieces:
            result[box.slices].copy_(piece)
        return result

    def _part(self, file: str, name: str, box: Box) -> Tensor:
        if file not in self._files:
            self._files[file] = safe_open(self.folder / file, framework="pt")
        if not box.shape:
            scalar: Tensor = self._files[file].get_tensor(name)
            return scalar
        part: Tensor = self._files[file].get_slice(name)[box.slices]
        return part
