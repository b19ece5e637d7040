"""Who holds which piece of which tensor: how ranks divide the writing, and how any mesh reads it back.

Each rank writes `rank-N.safetensors` with its pieces and `rank-N.json` that says which box of which whole tensor each
piece is. A reader puts the pieces together over the box it wants, so the world size that wrote does not matter.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.mistakes import UserMistake
from shoal.models.pieces import Box, Piece, local_tensor, whole
from shoal.parallel.placement import Placement


@dataclass(frozen=True)
class Entry:
    """A whole tensor on disk: its shape, and where boxes of it are."""

    shape: tuple[int, ...]
    pieces: tuple[tuple[str, str, Box], ...]  # file, name there, which part of the whole


@dataclass(frozen=True)
class Part:
    """What this rank has of a whole tensor."""

    tensor: Tensor
    pieces: list[Piece]
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
        number, count = placement.grid.replica(over)
        load = loads.setdefault(over, [0] * count)
        writer = load.index(min(load))
        # Of the whole: parts of it may differ in size, and with them what ranks think of each other's load.
        whole_size = placement.whole_shape(parameter, tensor)
        load[writer] += prod(whole_size) * tensor.element_size()
        if writer == number and (held := placement.pieces(parameter, tensor)):
            chosen[key] = Part(tensor, held, whole_size)
    return chosen


def write_pieces(folder: Path, parts: Mapping[str, Part], rank: int) -> list[Path]:
    """Write this rank's pieces and their table; returns the files written."""
    data, table = folder / f"rank-{rank:05d}.safetensors", folder / f"rank-{rank:05d}.json"
    boxes: dict[str, Any] = {}
    stored: dict[str, Tensor] = {}
    for name, part in parts.items():
        local = local_tensor(part.tensor)
        for index, piece in enumerate(part.pieces):
            key = name if index == 0 else f"{name}#{index}"
            boxes[key] = {
                "whole": list(part.whole),
                "offset": list(piece.whole.offset),
                "shape": list(piece.whole.shape),
            }
            stored[key] = local[piece.local.slices].contiguous().cpu()
    save_file(stored, data)
    table.write_text(json.dumps(boxes))
    return [data, table]


class PieceReader:
    """Reads boxes of whole tensors from a checkpoint's folder, whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        self._files: dict[str, Any] = {}
        for path in sorted(folder.glob("rank-*.json")):
            for key, place in json.loads(path.read_text()).items():
                box = Box(tuple(place["offset"]), tuple(place["shape"]))
                name = key.partition("#")[0]  # a rank that has several boxes of a tensor numbers them
                known = self.entries.get(name)
                pieces = (*(known.pieces if known else ()), (path.with_suffix(".safetensors").name, key, box))
                self.entries[name] = Entry(tuple(place["whole"]), pieces)

    def shapes(self, prefix: str) -> dict[str, tuple[int, ...]]:
        """Name (without `prefix`) → whole shape of every tensor under `prefix`."""
        return {
            name.removeprefix(prefix): entry.shape for name, entry in self.entries.items() if name.startswith(prefix)
        }

    def read_into(self, name: str, tensor: Tensor, pieces: list[Piece]) -> None:
        """Fill the `pieces` of the whole that `tensor` holds on this rank."""
        local = local_tensor(tensor)
        for piece in pieces:
            filled = 0
            for file, key, box in self.entries[name].pieces:
                shared = piece.whole.overlap(box)
                if not shared.empty:
                    place = local[piece.local.slices][shared.within(piece.whole).slices]
                    place.copy_(self._part(file, key, shared.within(box)))
                    filled += prod(shared.shape)
            if filled != prod(piece.whole.shape):
                raise UserMistake(f"{self.folder} holds only a part of {name}: it was not written whole.")

    def read_whole(self, name: str) -> Tensor:
        """The whole tensor, put together on the host."""
        entry = self.entries[name]
        found = [(self._part(file, key, whole(box.shape)), box) for file, key, box in entry.pieces]
        if len(found) == 1 and found[0][1].shape == entry.shape:
            return found[0][0]
        result = torch.empty(entry.shape, dtype=found[0][0].dtype)
        for piece, box in found:
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
