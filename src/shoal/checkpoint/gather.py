"""`checkpoint.format: full`: rank 0 gathers all tensor slices and writes one file."""

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.checkpoint.layout import Part
from shoal.models.tensor_slices import SliceMapping, TensorSlice, local_tensor, whole
from shoal.parallel.ranks import Ranks


def gather(parts: Mapping[str, Part], ranks: Ranks, heartbeat: Callable[[], None] = lambda: None) -> dict[str, Part]:
    """Gather full tensors in host memory on rank 0, which must have room for all of them; other ranks get nothing.

    `heartbeat` is called after each tensor slice.
    """
    if not ranks.first:
        _send(parts, heartbeat)
        return {}
    found: dict[str, Tensor] = {}
    for name, full_shape, tensor_slice, tensor in _local_slices(parts):
        _put(found, name, full_shape, tensor_slice, tensor)
    for rank in range(1, ranks.world_size):
        for entry in json.loads(bytes(_receive(rank, int(_receive(rank, 8).view(torch.int64))).tolist())):
            dtype = getattr(torch, entry["dtype"])
            tensor_slice = TensorSlice(tuple(entry["offset"]), tuple(entry["shape"]))
            tensor = _receive(rank, prod(tensor_slice.shape) * dtype.itemsize).view(dtype).reshape(tensor_slice.shape)
            _put(found, entry["name"], tuple(entry["whole"]), tensor_slice, tensor)
            heartbeat()
    return {name: _full_part(tensor) for name, tensor in found.items()}


def _local_slices(parts: Mapping[str, Part]) -> Iterator[tuple[str, tuple[int, ...], TensorSlice, Tensor]]:
    for name, part in parts.items():
        local = local_tensor(part.tensor)
        for mapping in part.slices:
            yield name, part.full_shape, mapping.whole, local[mapping.local.slices]


def _send(parts: Mapping[str, Part], heartbeat: Callable[[], None]) -> None:
    """Send a table of contents, then the bytes of each slice in the same order."""
    entries: list[dict[str, Any]] = [
        {
            "name": name,
            "whole": shape,
            "offset": tensor_slice.offset,
            "shape": tensor_slice.shape,
            "dtype": str(tensor.dtype)[6:],
        }
        for name, shape, tensor_slice, tensor in _local_slices(parts)
    ]
    text = json.dumps(entries).encode()
    dist.send(torch.tensor([len(text)]).view(torch.uint8), 0)
    dist.send(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0)
    for _, _, _, tensor in _local_slices(parts):
        dist.send(tensor.contiguous().cpu().reshape(-1).view(torch.uint8), 0)
        heartbeat()


def _receive(rank: int, size: int) -> Tensor:
    received = torch.empty(size, dtype=torch.uint8)
    dist.recv(received, rank)
    return received


def _put(
    found: dict[str, Tensor], name: str, shape: tuple[int, ...], tensor_slice: TensorSlice, tensor: Tensor
) -> None:
    if name not in found:
        found[name] = torch.empty(shape, dtype=tensor.dtype)
    found[name][tensor_slice.slices].copy_(tensor)


def _full_part(tensor: Tensor) -> Part:
    tensor_slice = whole(tuple(tensor.shape))
    return Part(tensor, [SliceMapping(tensor_slice, tensor_slice)], tuple(tensor.shape))
