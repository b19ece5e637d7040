"""Muon (Jordan et al., 2024): momentum whose matrices are orthogonalized, so that all directions are learnt alike.

PyTorch has it, but on a sharded matrix every matmul of the iteration is a collective of its own, and is summed in
another order than on one device. Here an all-to-all, in the bf16 of the iteration, gives each rank whole matrices to
orthogonalize: the update of a shard is bitwise that of the whole matrix.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

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
                updates = [self._momentum(parameter, momentum) for parameter in some]
                for parameter, direction in zip(some, _orthogonalize_shards(some, updates), strict=True):
                    weight = local_tensor(parameter)
                    weight.mul_(1 - lr * decay)
                    weight.add_(direction, alpha=-lr * ADAMW_RMS * math.sqrt(max(parameter.shape)))

    def _momentum(self, parameter: Tensor, momentum: float) -> Tensor:
        """This rank's shard of the update before it is orthogonalized."""
        if not self.state[parameter]:
            self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        assert parameter.grad is not None
        gradient, average = local_tensor(parameter.grad), local_tensor(self.state[parameter]["momentum_buffer"])
        average.lerp_(gradient, 1 - momentum)
        return gradient.lerp(average, momentum).bfloat16()


def _together(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape that are sharded alike, as many as there are ranks to orthogonalize them."""
    alike: dict[Any, list[Tensor]] = {}
    for parameter in parameters:
        sharding = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        alike.setdefault((sharding, parameter.shape), []).append(parameter)
    for some in alike.values():
        group = _sharding_group(some[0])
        count = 1 if group is None else dist.get_world_size(group)
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


def _orthogonalize_shards(parameters: Sequence[Tensor], updates: Sequence[Tensor]) -> Sequence[Tensor]:
    """This rank's shards of the orthogonalized `updates`, of which it has shards. Rank k orthogonalizes the k-th."""
    group = _sharding_group(parameters[0])
    if group is None:
        return [orthogonalize(update) for update in updates]
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    rows, columns = parameters[0].shape
    # As torch shards: every rank has as many rows as the first, until there are none left.
    most = -(-rows // ranks)
    sizes = [columns * max(0, min(most, rows - index * most)) for index in range(ranks)]
    shards = [updates[0].numel()] * len(updates) + [0] * (ranks - len(updates))
    whole = sizes if rank < len(updates) else [0] * ranks
    gathered = _all_to_all(torch.cat([update.flatten() for update in updates]), shards, whole, group)
    if rank < len(updates):
        gathered = orthogonalize(gathered.view(rows, columns)).flatten()
    scattered = _all_to_all(gathered, whole, shards, group)
    return [one.view(-1, columns) for one in torch.split_with_sizes(scattered, shards)[: len(updates)]]


def _all_to_all(given: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    found = given.new_empty(sum(received))
    dist.all_to_all_single(found, given, received, sent, group=group)
    return found


def orthogonalize(matrix: Tensor) -> Tensor:
    """A matrix with about the singular vectors of `matrix` (bf16), and singular values of about 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if tall else matrix
    first, third, fifth = COEFFICIENTS
    found = found / found.norm().clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), found, beta=first)
    return found.T if tall else found
