"""Collectives with autograd, of which the backward of each is its opposite; and how one collective communicates many
tensors.

Those with autograd use functional collectives, which torch.compile traces without a graph break.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

Group = dist.ProcessGroup
Item = TypeVar("Item")

# torch 2.13 renames these and deprecates their old names: the new name where it exists.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_functional_all_gather: Any = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
_functional_reduce_scatter: Any = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor


def in_buckets(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes sum to at most `most`, so that one collective communicates many; a larger item gets
    a bucket of its own."""
    bucket: list[Item] = []
    filled = 0
    for item in items:
        if bucket and filled + size(item) > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size(item)
    if bucket:
        yield bucket


def broadcast_first(tensor: Tensor) -> None:
    """Rank 0's values, in place on every rank. As bytes: gloo does not know every dtype."""
    held = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    dist.broadcast(held, 0)
    tensor.data.copy_(held.view(tensor.dtype).view(tensor.shape))


def all_gather(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    """Concatenate the tensors of all ranks along `dimension`; the backward is a reduce-scatter."""
    result: Tensor = _AllGather.apply(tensor, dimension, group)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    """Sum over ranks, of which each keeps its chunk along `dimension`; the backward is an all-gather."""
    result: Tensor = _ReduceScatter.apply(tensor, dimension, group)  # type: ignore[no-untyped-call]
    return result


def all_to_all(tensor: Tensor, scattered: int, gathered: int, group: Group) -> Tensor:
    """Split along `scattered`, send each rank its chunk, and concatenate the received chunks along `gathered`."""
    result: Tensor = _AllToAll.apply(tensor, scattered, gathered, group)  # type: ignore[no-untyped-call]
    return result


def local_chunk(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    """This rank's chunk of a tensor that is replicated. Its gradient has values in this rank's chunk only."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return tensor.chunk(size, dimension)[rank]


def _all_gather(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    # Collectives concatenate along dimension 0, where the chunks are contiguous in memory.
    gathered = _functional_all_gather(tensor.transpose(0, dimension).contiguous(), 0, group)
    return _wait(gathered).transpose(0, dimension).contiguous()


def _reduce_scatter(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    summed = _functional_reduce_scatter(tensor.transpose(0, dimension).contiguous(), "sum", 0, group)
    return _wait(summed).transpose(0, dimension).contiguous()


def _all_to_all(tensor: Tensor, scattered: int, gathered: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    sent = torch.stack(tensor.chunk(size, scattered))
    received = _wait(functional.all_to_all_single(sent, None, None, group))
    return torch.cat(received.unbind(0), gathered)


def _wait(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective."""
    result: Tensor = functional.wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return result


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int, group: Group) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return _all_gather(tensor, dimension, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _reduce_scatter(gradient, ctx.dimension, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int, group: Group) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return _reduce_scatter(tensor, dimension, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _all_gather(gradient, ctx.dimension, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scattered: int, gathered: int, group: Group) -> Tensor:
        ctx.scattered, ctx.gathered, ctx.group = scattered, gathered, group
        return _all_to_all(tensor, scattered, gathered, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.gathered, ctx.scattered, ctx.group), None, None, None
