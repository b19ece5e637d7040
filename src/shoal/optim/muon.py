"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalized, so that all directions are learnt alike.

PyTorch has it, but on a sharded matrix every matmul of the iteration is a collective of its own, and is summed in
another order than on one device. Here an all-to-all, in the bf16 of the iteration, gives each rank whole matrices to
orthogonalize: the update of a shard is bitwise that of the whole matrix. Matrices of one shape go through the iteration
in one batch, which is bitwise the same and, where they are small, takes less than half of the time: see
benchmarks/gpu/muon.py.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from shoal.catalogue.optimizers import orthogonalized_together
from shoal.models.tensor_slices import local_tensor

# The quintic Newton-Schulz iteration of the reference implementation: steep at zero, so that five steps are enough.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5
EPSILON = 1e-7
# An orthogonalized matrix has singular values of 1; times this and the root of its longer side, its elements are about
# as large as an update of AdamW, whose learning rate and weight decay can be used (Liu et al., 2025).
ADAMW_RMS = 0.2


class Muon(Optimizer):
    """For matrices. Nesterov momentum; state and weights may be sharded."""

    def __init__(self, params: Iterable[Any], lr: float, momentum: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Muon takes no closure"
        for group in self.param_groups:
            momentum, lr, decay = group["momentum"], group["lr"], group["weight_decay"]
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for some in _together(parameters):
                weights = [local_tensor(parameter) for parameter in some]
                directions = _orthogonalize_shards(some, self._momentum(some, momentum))
                torch._foreach_mul_(weights, 1 - lr * decay)
                scale = -lr * ADAMW_RMS * math.sqrt(max(some[0].shape))
                torch._foreach_add_(weights, list(directions), alpha=scale)

    def _momentum(self, parameters: Sequence[Tensor], momentum: float) -> Tensor:
        """This rank's shards of the updates before they are orthogonalized, in one tensor."""
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        gradients = [local_tensor(parameter.grad) for parameter in parameters if parameter.grad is not None]
        averages = [local_tensor(self.state[parameter]["momentum_buffer"]) for parameter in parameters]
        torch._foreach_lerp_(averages, gradients, 1 - momentum)
        updates = torch._foreach_lerp(gradients, averages, momentum)
        stacked = gradients[0].new_empty((len(updates), *updates[0].shape), dtype=torch.bfloat16)
        torch._foreach_copy_(list(stacked.unbind()), updates)
        return stacked


def _together(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape that are sharded alike, a batch for every rank that orthogonalizes them."""
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        sharding = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        alike.setdefault((sharding, parameter.shape, parameter.dtype), []).append(parameter)
    for some in alike.values():
        group = _sharding_group(some[0])
        ranks = 1 if group is None else dist.get_world_size(group)
        count = ranks * orthogonalized_together(some[0].numel())
        for start in range(0, len(some), count):
            yield some[start : start + count]


def _sharding_group(parameter: Tensor) -> dist.ProcessGroup | None:
    """The ranks over which the rows of `parameter` are sharded."""
    if not isinstance(parameter, DTensor):
        return None
    dimensions = [index for index, one in enumerate(parameter.placements) if one.is_shard()]
    if not dimensions:
        return None
    (dimension,) = dimensions  # FSDP shards once, and rows
    assert parameter.placements[dimension].is_shard(0)
    return parameter.device_mesh.get_group(dimension)


def _orthogonalize_shards(parameters: Sequence[Tensor], updates: Tensor) -> Sequence[Tensor]:
    """This rank's shards of the orthogonalized `updates`, of which it has shards: each rank orthogonalizes some."""
    group = _sharding_group(parameters[0])
    if group is None:
        return orthogonalize(updates).unbind()
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, columns = parameters[0].shape
    sharded, matrices = _sizes(rows, ranks), _sizes(len(updates), ranks)
    mine = matrices[rank]
    given = [count * sharded[rank] * columns for count in matrices]
    taken = [mine * size * columns for size in sharded]
    gathered = _all_to_all(updates.flatten(), given, taken, group)
    if mine:
        parts = [part.view(mine, -1, columns) for part in gathered.split_with_sizes(taken) if part.numel()]
        whole = orthogonalize(torch.cat(parts, dim=1))
        gathered = torch.cat([part.flatten() for part in whole.split_with_sizes(sharded, dim=1)])
    scattered = _all_to_all(gathered, taken, given, group)
    return scattered.view(len(updates), sharded[rank], columns).unbind()


def _sizes(count: int, ranks: int) -> list[int]:
    """As torch shards: every rank has as many as the first, until there are none left."""
    most = -(-count // ranks)
    return [max(0, min(most, count - rank * most)) for rank in range(ranks)]


def _all_to_all(given: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = given.new_empty(sum(received))
    dist.all_to_all_single(found, given, received, sent, group=group)
    return found


def orthogonalize(matrices: Tensor) -> Tensor:
    """Matrices with about the singular vectors of `matrices` (a batch in bf16), and singular values of about 1."""
    tall = matrices.shape[-2] > matrices.shape[-1]
    found = matrices.mT if tall else matrices
    first, third, fifth = COEFFICIENTS
    found = found / found.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = found @ found.mT
        found = torch.baddbmm(found, torch.baddbmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.mT if tall else found
