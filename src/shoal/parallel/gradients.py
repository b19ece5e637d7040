"""Gradients after the last micro-batch of a step: partial gradients are reduced, then measured and scaled.

Squares are summed in fp64. The norm then rounds to the same fp32 value however the sum is split over ranks, and
clipping is bitwise identical for one process and many.
"""

from collections.abc import Collection, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.models.tensor_slices import local_tensor
from shoal.parallel.collectives import in_buckets
from shoal.parallel.placement import Placement

ShardedOver = tuple[DeviceMesh, tuple[int, ...]] | None
# Elements per bucket when gradients are summed over a group.
BUCKET = 1 << 25


class Gradients:
    """The gradients of the trained `parameters` of this rank."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        placement: Placement,
        *,
        averages: Collection[str],
        in_place: bool,
    ) -> None:
        """`averages`: names of the gradients that neither DDP nor FSDP averages over the replicas, so it is done here.
        `in_place`: gradients stay where they are, as views of DDP's buckets."""
        self.parameters = {name: one for name, one in parameters.items() if one.requires_grad}
        self.placement = placement
        self.averages = [name for name in self.parameters if name in averages]
        self.in_place = in_place
        # With CPU offload, gradients are not on the device that the model runs on.
        self._device = next(
            (local_tensor(one).device for one in self.parameters.values()), placement.parallel_dims.device
        )

    def finish(self) -> None:
        """After the last micro-batch: complete the reductions that DDP or FSDP has not done."""
        parallel_dims, placement = self.placement.parallel_dims, self.placement
        if self.averages and parallel_dims.gradient_ranks > 1:
            held = self._local(self.averages)
            sum_over(held, parallel_dims.replicas.get_group())
            if held:
                torch._foreach_div_(held, parallel_dims.gradient_ranks)
        if parallel_dims.tp is not None:
            # On each tensor-parallel rank a replicated parameter has seen only a shard of the tokens or heads.
            sum_over(self._local(name for name in self.parameters if name not in placement.splits), parallel_dims.tp)
        if placement.tied_across_stages and parallel_dims.embedding_group is not None:
            sum_over(
                self._local(name for name in self.parameters if name in placement.tied_across_stages),
                parallel_dims.embedding_group,
            )

    def norm(self) -> Tensor:
        """The global 2-norm of all gradients in fp32, the same on all ranks. No host synchronization."""
        parallel_dims = self.placement.parallel_dims
        kinds: dict[tuple[ShardedOver, bool], list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None or name in self.placement.owned_by_another_stage:
                continue
            over: ShardedOver = None
            if isinstance(gradient, DTensor):
                dimensions = tuple(i for i, placed in enumerate(gradient.placements) if isinstance(placed, Shard))
                over = (gradient.device_mesh, dimensions) if dimensions else None
            kinds.setdefault((over, name in self.placement.splits), []).append(local_tensor(gradient))
        # The ranks of a stage have the same kinds of parameters, so they issue the same all-reduces.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for (over, is_split), gradients in kinds.items():
            square = torch.zeros_like(total)
            for some in _grouped(gradients):
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
        """Zero the gradients after the step."""
        if self.in_place:
            # Views of DDP's buckets: if they were set to None, a micro-batch under no_sync would allocate new ones. Or
            # at the addresses to which CUDA graphs add.
            if held := self._local(self.parameters):
                torch._foreach_zero_(held)
            return
        for parameter in self.parameters.values():
            parameter.grad = None

    def multiply(self, factor: Tensor) -> None:
        for some in _grouped(self._local(self.parameters)):
            torch._foreach_mul_(some, factor.to(some[0].device))

    def _local(self, names: Iterable[str]) -> list[Tensor]:
        gradients = (self.parameters[name].grad for name in names)
        return [local_tensor(gradient) for gradient in gradients if gradient is not None]


def _grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, as foreach kernels need them; mixed lists take the slow path."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def clip_factor(norm: Tensor, limit: float | None) -> Tensor:
    """The factor that scales gradients to a norm of at most `limit`."""
    return torch.ones_like(norm) if limit is None else (limit / (norm + 1e-6)).clamp(max=1.0)


def sum_over(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """All-reduce each tensor over `group`, in place, in buckets."""
    for some in _grouped(tensors):
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
