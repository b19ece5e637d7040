"""Collectives with autograd: the backward of each is its opposite.

They use functional collectives, which torch.compile traces without a graph break.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from shoal.parallel.renamed import functional_all_gather, functional_reduce_scatter

Group = dist.ProcessGroup


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
    gathered = functional_all_gather(tensor.transpose(0, dimension).contiguous(), 0, group)
    return _wait(gathered).transpose(0, dimension).contiguous()


def _reduce_scatter(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    summed = functional_reduce_scatter(tensor.transpose(0, dimension).contiguous(), "sum", 0, group)
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
