"""The device mesh of a run: this rank's mesh coordinate and its process groups."""

from functools import cached_property
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config.mesh import Mesh
from shoal.parallel.ranks import Ranks

# Slowest links outermost: pipeline stages communicate least, tensor-parallel ranks most.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


class ParallelDims:
    """Process groups are created on first use, which must happen in the same order on all ranks."""

    def __init__(self, mesh: Mesh, ranks: Ranks) -> None:
        assert mesh.world_size == ranks.world_size, (mesh, ranks.world_size)
        self.mesh = mesh
        self.device = ranks.device
        rest, coordinate = ranks.rank, {}
        for name, size in reversed(list(zip(DIMENSIONS, mesh.degrees, strict=True))):
            rest, coordinate[name] = divmod(rest, size)
        self.coordinate = coordinate

    @property
    def data_rank(self) -> int:
        """This rank's index among the data-parallel ranks; the ranks of one pp, cp or tp group share it."""
        return self.coordinate["dp_replicate"] * self.mesh.dp_shard + self.coordinate["dp_shard"]

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks that compute gradients of the same weights from different tokens."""
        return self.mesh.data_parallel * self.mesh.cp

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: tensor-parallel ranks all have the same one."""
        return self.coordinate["tp"] == 0

    def replica(self, over: tuple[str, ...]) -> tuple[int, int]:
        """(index, size) of this rank among the ranks that differ only in the mesh dimensions `over`."""
        index = 0
        for name in over:
            index = index * getattr(self.mesh, name) + self.coordinate[name]
        return index, prod(getattr(self.mesh, name) for name in over)

    @cached_property
    def sharding(self) -> DeviceMesh:
        """The mesh that FSDP shards over, including context-parallel ranks. HSDP replicas are its outer dimension."""
        sizes = (self.mesh.pp, self.mesh.dp_replicate, self.mesh.dp_shard * self.mesh.cp, self.mesh.tp)
        names = ("pp", "dp_replicate", "dp_shard_cp", "tp")
        mesh = init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        return mesh["dp_replicate", "dp_shard_cp"] if self.mesh.dp_replicate > 1 else mesh["dp_shard_cp"]

    @cached_property
    def replicas(self) -> DeviceMesh:
        """All ranks that hold the same weights: DDP averages over them, and ZeRO-1 shards optimizer state over them."""
        sizes = (self.mesh.pp, self.gradient_ranks, self.mesh.tp)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=("pp", "replicas", "tp"))["replicas"]

    @cached_property
    def _device_mesh(self) -> DeviceMesh:
        return init_device_mesh(self.device.type, self.mesh.degrees, mesh_dim_names=DIMENSIONS)

    @cached_property
    def tp(self) -> dist.ProcessGroup | None:
        return self._device_mesh["tp"].get_group() if self.mesh.tp > 1 else None

    @cached_property
    def cp(self) -> dist.ProcessGroup | None:
        return self._device_mesh["cp"].get_group() if self.mesh.cp > 1 else None

    @cached_property
    def pp(self) -> dist.ProcessGroup | None:
        return self._device_mesh["pp"].get_group() if self.mesh.pp > 1 else None

    @cached_property
    def embedding_group(self) -> dist.ProcessGroup | None:
        """The first and the last stage of this rank's pipeline, which both hold a tied embedding."""
        if self.mesh.pp == 1:
            return None
        stride = self.mesh.world_size // self.mesh.pp
        mine = None
        for first in range(stride):  # creating a group is collective
            pair = [first, first + stride * (self.mesh.pp - 1)]
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                mine = group
        return mine
