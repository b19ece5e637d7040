"""Gradients of a step after its passes: summed where ranks have parts of them, measured, multiplied.

Squares are summed in fp64, so that however the sum is split over ranks the norm rounds to the same fp32 number, and
clipping changes no bit between one process and many.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.models.tensor_slices import local_tensor
from shoal.parallel.buckets import in_buckets
from shoal.parallel.placement import Placement

ShardedOver = tuple[DeviceMesh, tuple[int, ...]] | None
# Gradients are summed over a group in buckets of about so many numbers.
BUCKET = 1 << 25


class Gradients:
    """The gradients of the trained `parameters` of this rank."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        placement: Placement,
        *,
        averages: Collection[str],
        in_buckets: bool,
    ) -> None:
        """`averages`: names of those that nothing which wraps the model averages over replicas, so it is done here.
        `in_buckets`: DDP does, and keeps them."""
        self.parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self.placement = placement
        self.averages = [name for name in self.parameters if name in averages]
        self.in_buckets = in_buckets
        # Where gradients are: with everything offloaded that is not where the model runs.
        self._device = next(
            (local_tensor(one).device for one in self.parameters.values()), placement.parallel_dims.device
        )

    def finish(self) -> None:
        """After the last pass: make each gradient the whole step's, as far as what wraps the model has not."""
        parallel_dims, placement = self.placement.parallel_dims, self.placement
        if self.averages and parallel_dims.gradient_ranks > 1:
            held = self._local(self.averages)
            sum_over(held, parallel_dims.replicas.get_group())
            if held:
                torch._foreach_div_(held, parallel_dims.gradient_ranks)
        if parallel_dims.tp is not None:
            # What is not cut has seen a part of the tokens, or of the heads, on each tensor-parallel rank.
            sum_over(self._local(name for name in self.parameters if name not in placement.splits), parallel_dims.tp)
        if placement.at_both_ends and parallel_dims.ends is not None:
            sum_over(
                self._local(name for name in self.parameters if name in placement.at_both_ends), parallel_dims.ends
            )

    def norm(self) -> Tensor:
        """The 2-norm of all gradients together, as fp32; the same on all ranks. The host does not wait."""
        parallel_dims = self.placement.parallel_dims
        kinds: dict[tuple[ShardedOver, bool], list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None or name in self.placement.counted_elsewhere:
                continue
            over: ShardedOver = None
            if isinstance(gradient, DTensor):
                dimensions = tuple(i for i, place in enumerate(gradient.placements) if isinstance(place, Shard))
                over = (gradient.device_mesh, dimensions) if dimensions else None
            kinds.setdefault((over, name in self.placement.splits), []).append(local_tensor(gradient))
        # Ranks of a stage have parameters of the same kinds, and meet in the same sums.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for (over, is_split), gradients in kinds.items():
            square = torch.zeros_like(total)
            for some in _alike(gradients):
                norms = torch._foreach_norm(some, 2, torch.float64)
                square = square + torch.stack(norms).square().sum().to(self._device)
            if over is not None:
                mesh, dimensions = over
                for dimension in dimensions:
                    dist.all_reduce(square, group=mesh.get_group(dimension))
            if is_split and parallel_dims.tp is not None:
                dist.all_reduce(square, group=parallel_dims.tp)
            total = total + square
        if parallel_dims.pp is not None:
            dist.all_reduce(total, group=parallel_dims.pp)
        return total.sqrt().float()

    def clear(self) -> None:
        """After the step."""
        if self.in_buckets:
            # Views of DDP's buckets. Dropped, those of a first pass without exchange would be made beside them.
            if held := self._local(self.parameters):
                torch._foreach_zero_(held)
            return
        for parameter in self.parameters.values():
            parameter.grad = None

    def multiply(self, factor: Tensor) -> None:
        for some in _alike(self._local(self.parameters)):
            torch._foreach_mul_(some, factor.to(some[0].device))

    def _local(self, names: Iterable[str]) -> list[Tensor]:
        gradients = (self.parameters[name].grad for name in names)
        return [local_tensor(gradient) for gradient in gradients if gradient is not None]


def _alike(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors of one type on one device each: what one kernel takes together. Others are copied one by one."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def clip_factor(norm: Tensor, limit: float | None) -> Tensor:
    """What gradients are multiplied with so that their norm is at most `limit`."""
    return torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum each tensor over `group`, in place, many in one exchange."""
    for some in _alike(tensors):
        for bucket in in_buckets(some, Tensor.numel, BUCKET):
            _sum_bucket(bucket, group)


def _sum_bucket(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    if len(tensors) == 1 and tensors[0].is_contiguous():
        dist.all_reduce(tensors[0], group=group)
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
