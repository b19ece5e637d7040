"""The global gradient norm, and the one multiplication that clips and unscales.

Squares are summed in fp64, so that however the sum is split over ranks the norm rounds to the same fp32 number, and
clipping changes no bit between one process and many.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.models.pieces import local_tensor

ShardedOver = tuple[DeviceMesh, tuple[int, ...]] | None


def global_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, as fp32 on the device; the same on all ranks. The host does not wait."""
    groups: dict[ShardedOver, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        over: ShardedOver = None
        if isinstance(gradient, DTensor):
            dimensions = tuple(i for i, place in enumerate(gradient.placements) if isinstance(place, Shard))
            over = (gradient.device_mesh, dimensions) if dimensions else None
        groups.setdefault(over, []).append(local_tensor(gradient))
    assert groups, "the backward pass left no gradient"
    total: Tensor | None = None
    for over, gradients in groups.items():
        square = torch.stack(torch._foreach_norm(gradients, 2, torch.float64)).square().sum()
        if over is not None:
            mesh, dimensions = over
            for dimension in dimensions:
                dist.all_reduce(square, group=mesh.get_group(dimension))
        total = square if total is None else total + square
    assert total is not None
    return total.sqrt().float()


def clip_factor(norm: Tensor, limit: float | None) -> Tensor:
    """What gradients are multiplied with so that their norm is at most `limit`."""
    return torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def multiply(parameters: list[nn.Parameter], factor: Tensor) -> None:
    gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, factor)
