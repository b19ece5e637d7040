"""The device mesh of a run: this rank's mesh coordinate and its process groups."""

from functools import cached_property

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.config.mesh import AXES, BATCH_AXES, REPLICA_AXES, SAME_LOSS_AXES, SHARD_AXES, TOKEN_AXES, Mesh
from shoal.parallel.ranks import Ranks

# Consecutive axes that are one dimension of a DeviceMesh.
FLATTENED = {"dp_shard_cp": SHARD_AXES, "dp_replicas": REPLICA_AXES, "replicas": TOKEN_AXES}


class ParallelDims:
    """Process groups are created on first use, which must happen in the same order on all ranks."""

    def __init__(self, mesh: Mesh, ranks: Ranks) -> None:
        assert mesh.world_size == ranks.world_size, (mesh, ranks.world_size)
        self.mesh = mesh
        self.device = ranks.device
        self.coordinate = mesh.coordinate(ranks.rank)

    @property
    def data_rank(self) -> int:
        """This rank's index among the data-parallel ranks; the ranks of one pp, cp or tp group share it."""
        return self.replica(BATCH_AXES)[0]

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks that compute gradients of the same weights from different tokens."""
        return self.mesh.gradient_ranks

    @property
    def reports_loss(self) -> bool:
        """Whether this rank's loss counts: tensor-parallel ranks all have the same one."""
        return self.replica(SAME_LOSS_AXES)[0] == 0

    def replica(self, over: tuple[str, ...]) -> tuple[int, int]:
        """(index, size) of this rank among the ranks that differ only along the axes `over`."""
        index = 0
        for axis in over:
            index = index * self.mesh.degrees[axis] + self.coordinate[axis]
        return index, self.mesh.size(over)

    @cached_property
    def sharding(self) -> DeviceMesh:
        """The mesh that FSDP shards over, including context-parallel ranks. HSDP replicas are its outer dimension."""
        mesh = self._make_device_mesh("dp_replicas", "dp_shard_cp")
        return mesh["dp_replicas", "dp_shard_cp"] if self.mesh.sharded_replicas > 1 else mesh["dp_shard_cp"]

    @cached_property
    def replicas(self) -> DeviceMesh:
        """All ranks that hold the same weights: DDP averages over them, and ZeRO-1 shards optimizer state over them."""
        return self._make_device_mesh("replicas")["replicas"]

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """All axes, each a dimension of its own."""
        return self._make_device_mesh()

    def _make_device_mesh(self, *flattened: str) -> DeviceMesh:
        """The axes in their order, with those that each of `flattened` stands for as one dimension."""
        names = {axis: next((name for name in flattened if axis in FLATTENED[name]), axis) for axis in AXES}
        sizes: dict[str, int] = {}
        for axis, name in names.items():
            sizes[name] = sizes.get(name, 1) * self.mesh.degrees[axis]
        return init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def group(self, axis: str) -> dist.ProcessGroup | None:
        """The ranks that differ from this one only along `axis`; None: there is no other."""
        return self.device_mesh[axis].get_group() if self.mesh.degrees[axis] > 1 else None

    @cached_property
    def tp(self) -> dist.ProcessGroup | None:
        return self.group("tp")

    @cached_property
    def cp(self) -> dist.ProcessGroup | None:
        return self.group("cp")

    @cached_property
    def pp(self) -> dist.ProcessGroup | None:
        return self.group("pp")

    @cached_property
    def embedding_group(self) -> dist.ProcessGroup | None:
        """The first and the last stage of this rank's pipeline, which both hold a tied embedding."""
        if self.mesh.pp == 1:
            return None
        assert AXES[0] == "pp", "the ranks of a stage are consecutive"
        stride = self.mesh.world_size // self.mesh.pp
        mine = None
        for first in range(stride):  # creating a group is collective
            pair = [first, first + stride * (self.mesh.pp - 1)]
            group = dist.new_group(pair)
            if dist.get_rank() in pair:
                mine = group
        return mine
