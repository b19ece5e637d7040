"""The mesh of the config laid over real processes: where this rank stands, and with whom it exchanges what."""

from functools import cached_property
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config.mesh import Mesh
from shoal.parallel.ranks import Ranks

# Slowest links outermost: stages of a pipeline talk least, tensor-parallel ranks most.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class ParallelDims:
    """Groups are made when they are first asked for, which all ranks do in the same order."""

    def __init__(self, mesh: Mesh, ranks: Ranks) -> None:
        assert mesh.world_size == ranks.world_size, (mesh, ranks.world_size)
        self.mesh = mesh
        self.device = ranks.device
        rest, places = ranks.rank, {}
        for name, size in reversed(list(zip(DIMENSIONS, mesh.degrees, strict=True))):
            rest, places[name] = divmod(rest, size)
        self.place = places

    @property
    def data_rank(self) -> int:
        """Which share of the rows this rank works on; those of one pipeline, sequence or tensor group have the same."""
        return self.place["dp_replicate"] * self.mesh.dp_shard + self.place["dp_shard"]

    @property
    def gradient_ranks(self) -> int:
        """How many ranks have gradients of the same weights from different tokens."""
        return self.mesh.data_parallel * self.mesh.cp

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: tensor-parallel ranks all have the same one."""
        return self.place["tp"] == 0

    def replica(self, over: tuple[str, ...]) -> tuple[int, int]:
        """(this rank's number, how many) among the ranks that differ only in the dimensions `over`."""
        number = 0
        for name in over:
            number = number * getattr(self.mesh, name) + self.place[name]
        return number, prod(getattr(self.mesh, name) for name in over)

    @cached_property
    def sharding(self) -> DeviceMesh:
        """What FSDP shards over, context-parallel ranks included; replicas of the shards are its outer dimension."""
        sizes = (self.mesh.pp, self.mesh.dp_replicate, self.mesh.dp_shard * self.mesh.cp, self.mesh.tp)
        names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
        laid = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return laid["dp_replicate", "dp_shard_cp"] if self.mesh.dp_replicate > 1 else laid["dp_shard_cp"]

    @cached_property
    def replicas(self) -> DeviceMesh:
        """All ranks that have the same part of the model: what DDP averages over, and ZeRO-1 shares its state among."""
        sizes = (self.mesh.pp, self.gradient_ranks, self.mesh.tp)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("pp", "replicas", "tp"))["replicas"]

    @cached_property
    def _laid(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, self.mesh.degrees, mesh_dim_names=DIMENSIONS)

    @cached_property
    def tp(self) -> dist.ProcessGroup | None:
        return self._laid["tp"].get_group() if self.mesh.tp > 1 else None

    @cached_property
    def cp(self) -> dist.ProcessGroup | None:
        return self._laid["cp"].get_group() if self.mesh.cp > 1 else None

    @cached_property
    def pp(self) -> dist.ProcessGroup | None:
        return self._laid["pp"].get_group() if self.mesh.pp > 1 else None

    @cached_property
    def ends(self) -> dist.ProcessGroup | None:
        """The first and the last stage of this rank's pipeline, which both hold a tied embedding."""
        if self.mesh.pp == 1:
            return None
        stride = self.mesh.world_size // self.mesh.pp
        mine = None
        for first in range(stride):  # every rank makes every group
            pair = [first, first + stride * (self.mesh.pp - 1)]
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                mine = group
        return mine
