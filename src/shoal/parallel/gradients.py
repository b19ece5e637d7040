"""Gradients after the last micro-batch of a step: partial gradients are reduced, then measured and scaled.

Squares are summed in fp64. The norm then rounds to the same fp32 value however the sum is split over ranks, and
clipping is bitwise identical for one process and many.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.models.cross_entropy import has_kernel
from shoal.models.tensor_slices import local_tensor, local_tensors
from shoal.parallel.collectives import in_buckets
from shoal.parallel.placement import Placement

# Elements per bucket when gradients are summed over a group.
BUCKET = 1 << 25
# Elements of a gradient on the host that are squared at a time, and from which size on.
HOST_CHUNK, LARGE = 1 << 20, 1 << 17


@dataclass(frozen=True, eq=False)
class _Kind:
    """Gradients on one device that are sharded alike."""

    groups: list[dist.ProcessGroup]  # their sum of squares is all-reduced over each of these
    sum_of_squares: Callable[[Sequence[Tensor]], Tensor]


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
        # What a gradient's sharding means for the norm: by its parameter, with its DTensor's spec, which FSDP reuses.
        self._kinds: dict[str, tuple[object, _Kind]] = {}
        self._kinds_by_sharding: dict[tuple[DeviceMesh | None, tuple[int, ...], bool, torch.device], _Kind] = {}
        # With CPU offload, gradients are not on the device that the model runs on.
        self._device = next(
            (local_tensor(one).device for one in self.parameters.values()), placement.parallel_dims.device
        )

    def part(self, parameters: Mapping[str, nn.Parameter]) -> "Gradients":
        """The same for some of the parameters: those of one optimizer of several."""
        return Gradients(parameters, self.placement, averages=self.averages, in_place=self.in_place)

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
        pipeline = self.placement.parallel_dims.pp
        elsewhere = self.placement.owned_by_another_stage
        kinds: dict[_Kind, list[Tensor]] = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad
            if gradient is None or name in elsewhere:
                continue
            kinds.setdefault(self._kind(name, gradient), []).append(gradient)
        # The ranks of a stage have the same kinds of parameters, so they issue the same all-reduces.
        total: Tensor | None = None
        for kind, gradients in kinds.items():
            square = kind.sum_of_squares(local_tensors(gradients)).to(self._device)
            for group in kind.groups:
                dist.all_reduce(square, group=group)
            total = square if total is None else total + square
        if total is None:
            total = torch.zeros((), dtype=torch.float64, device=self._device)
        if pipeline is not None:
            dist.all_reduce(total, group=pipeline)
        return total.sqrt().float()

    def _kind(self, name: str, gradient: Tensor) -> _Kind:
        spec = gradient._spec if type(gradient) is DTensor else None
        known = self._kinds.get(name)
        if known is not None and known[0] is spec:
            return known[1]
        mesh: DeviceMesh | None = None
        dimensions: tuple[int, ...] = ()
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            dimensions = tuple(i for i, placed in enumerate(gradient.placements) if isinstance(placed, Shard))
        is_split = name in self.placement.splits
        sharding = (mesh if dimensions else None, dimensions, is_split, gradient.device)
        if sharding not in self._kinds_by_sharding:
            groups = [mesh.get_group(dimension) for dimension in dimensions] if mesh is not None else []
            if is_split and self.placement.parallel_dims.tp is not None:
                groups.append(self.placement.parallel_dims.tp)
            offloaded = gradient.device.type == "cpu" and self.placement.parallel_dims.device.type != "cpu"
            self._kinds_by_sharding[sharding] = _Kind(
                groups, _HostSumOfSquares() if offloaded else _make_sum_of_squares(gradient)
            )
        self._kinds[name] = spec, self._kinds_by_sharding[sharding]
        return self._kinds[name][1]

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
        return local_tensors(gradient for gradient in gradients if gradient is not None)


def _make_sum_of_squares(gradient: Tensor) -> Callable[[Sequence[Tensor]], Tensor]:
    """The function for gradients on the device of `gradient`."""
    if not has_kernel(gradient):
        return _sum_of_squares
    from shoal.parallel.norm_kernel import SumOfSquares

    return SumOfSquares()


def _sum_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    norms = torch.stack([norm for some in _grouped(tensors) for norm in torch._foreach_norm(some, 2, torch.float64)])
    return torch.dot(norms, norms)


class _HostSumOfSquares:
    """The same of gradients that a GPU's run has in host memory, where torch's norm with another dtype is not
    vectorized: large ones are converted a chunk at a time, into a buffer that stays in the caches."""

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        small = [one for one in tensors if one.numel() < LARGE]
        if len(small) == len(tensors):
            return _sum_of_squares(small)
        squares = [_sum_of_squares(small)] if small else []
        if self._buffer is None:
            self._buffer = torch.empty(HOST_CHUNK, dtype=torch.float64)
        for tensor in tensors:
            for chunk in torch.split(tensor.reshape(-1), HOST_CHUNK) if tensor.numel() >= LARGE else ():
                wide = self._buffer[: chunk.numel()].copy_(chunk)
                squares.append(torch.dot(wide, wide))
        return torch.stack(squares).sum()


def _grouped(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Group tensors by dtype and device, as foreach kernels need them; mixed lists take the slow path."""
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        found.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    return list(found.values())


def gradient_versions(gradients: Gradients) -> list[int]:
    """Numbers that change when a gradient is changed in place."""
    return [one._version for one in gradients._local(gradients.parameters)]


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
