"""ZeRO-1: every replica has all weights and gradients and updates its shard; an all-gather collects the shards."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.models.tensor_slices import local_tensor
from shoal.parallel.collectives import all_gather_single, in_buckets

# Elements per all-gather of updated shards, which bounds the memory of its buffers.
BUCKET = 1 << 24


class Partition:
    """This replica's shard of each parameter, as parameters that share its memory. Sharded by rows."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.whole = {name: one for name, one in parameters.items() if one.requires_grad and one.dim()}
        self.rows = {name: _rows(parameter, mesh) for name, parameter in self.whole.items()}
        self.shards = {name: _shard(one, self.rows[name], mesh) for name, one in self.whole.items()}
        # A scalar cannot be sharded: every replica updates it in the same way.
        self.parameters = {
            name: self.shards.get(name, parameter) for name, parameter in parameters.items() if parameter.requires_grad
        }

    def take_gradients(self) -> None:
        for name, shard in self.shards.items():
            gradient = self.whole[name].grad
            if gradient is not None:
                # `DTensor.from_local` would take many times the CPU time.
                local, spec = gradient[self.rows[name]], shard._spec  # type: ignore[attr-defined]
                gradient = DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]
            shard.grad = gradient

    @torch.no_grad()
    def all_gather_shards(self) -> None:
        """Give every replica the shards that the others have updated."""
        for shard in self.shards.values():
            shard.grad = None
        for dtype in dict.fromkeys(parameter.dtype for parameter in self.whole.values()):
            alike = [name for name, parameter in self.whole.items() if parameter.dtype == dtype]
            for bucket in in_buckets(alike, lambda name: self.whole[name].numel(), BUCKET):
                self._all_gather(bucket)

    def _shard_size(self, parameter: Tensor) -> int:
        """Elements of a parameter per replica; the last may have fewer."""
        replicas = self.mesh.size()
        return -(-parameter.shape[0] // replicas) * (parameter.numel() // parameter.shape[0])

    def _all_gather(self, names: list[str]) -> None:
        replicas = self.mesh.size()
        sizes = [self._shard_size(self.whole[name]) for name in names]
        first = self.whole[names[0]]
        mine = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        for part, name in zip(torch.split(mine, sizes), names, strict=True):
            local = local_tensor(self.shards[name])
            part[: local.numel()].copy_(local.reshape(-1))
        everyone = torch.empty(replicas * mine.numel(), dtype=mine.dtype, device=mine.device)
        all_gather_single(everyone, mine, group=self.mesh.get_group())
        for part, name in zip(torch.split(everyone.view(replicas, -1), sizes, dim=1), names, strict=True):
            whole = self.whole[name].detach()
            whole.copy_(part.reshape(-1)[: whole.numel()].view_as(whole))


def _shard(parameter: nn.Parameter, rows: slice, mesh: DeviceMesh) -> nn.Parameter:
    """This replica's rows as a DTensor, without a copy."""
    shape, stride = parameter.shape, parameter.stride()
    local = parameter.detach()[rows]
    return nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride))


def _rows(parameter: nn.Parameter, mesh: DeviceMesh) -> slice:
    size, rank = -(-parameter.shape[0] // mesh.size()), mesh.get_local_rank()
    return slice(size * rank, size * (rank + 1))
