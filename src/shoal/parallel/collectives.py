"""Collectives that gradients flow back through: each one's backward is its opposite.

Written with functional collectives, so that a compiled block contains them instead of breaking at them.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from shoal.parallel.renamed import functional_all_gather, functional_reduce_scatter

Group = dist.ProcessGroup


def gather(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    """The parts of all ranks, side by side along `dimension`; gradients are summed and each rank gets its part's."""
    result: Tensor = _Gather.apply(tensor, dimension, group)  # type: ignore[no-untyped-call]
    return result


def reduce_scatter(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    """The sum over ranks, of which each keeps its part along `dimension`; the opposite of `gather`."""
    result: Tensor = _ScatterSum.apply(tensor, dimension, group)  # type: ignore[no-untyped-call]
    return result


def all_to_all(tensor: Tensor, scattered: int, gathered: int, group: Group) -> Tensor:
    """Cut along `scattered`, give each rank its part, and lay what arrives side by side along `gathered`."""
    result: Tensor = _AllToAll.apply(tensor, scattered, gathered, group)  # type: ignore[no-untyped-call]
    return result


def own_part(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    """This rank's part of a tensor that all ranks have whole. Its gradient is this rank's part alone."""
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    return tensor.chunk(size, dimension)[rank]


def _gather(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    # Ranks are laid along the first dimension, which is the one that is contiguous in memory.
    gathered = functional_all_gather(tensor.transpose(0, dimension).contiguous(), 0, group)
    return _arrived(gathered).transpose(0, dimension).contiguous()


def _scatter_sum(tensor: Tensor, dimension: int, group: Group) -> Tensor:
    summed = functional_reduce_scatter(tensor.transpose(0, dimension).contiguous(), "sum", 0, group)
    return _arrived(summed).transpose(0, dimension).contiguous()


def _all_to_all(tensor: Tensor, scattered: int, gathered: int, group: Group) -> Tensor:
    size = dist.get_world_size(group)
    sent = torch.stack(tensor.chunk(size, scattered))
    received = _arrived(functional.all_to_all_single(sent, None, None, group))
    return torch.cat(received.unbind(0), gathered)


def _arrived(tensor: Tensor) -> Tensor:
    """The result of a functional collective, which is waited for when it is first used: now."""
    arrived: Tensor = functional.wait_tensor(tensor)  # type: ignore[no-untyped-call]
    return arrived


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int, group: Group) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return _gather(tensor, dimension, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _scatter_sum(gradient, ctx.dimension, ctx.group), None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dimension: int, group: Group) -> Tensor:
        ctx.dimension, ctx.group = dimension, group
        return _scatter_sum(tensor, dimension, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _gather(gradient, ctx.dimension, ctx.group), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, scattered: int, gathered: int, group: Group) -> Tensor:
        ctx.scattered, ctx.gathered, ctx.group = scattered, gathered, group
        return _all_to_all(tensor, scattered, gathered, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradient, ctx.gathered, ctx.scattered, ctx.group), None, None, None
