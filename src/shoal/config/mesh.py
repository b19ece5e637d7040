"""The device mesh of a run: its axes, and a degree of parallelism along each. Arithmetic only."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from math import lcm, prod
from typing import Any, Literal

from shoal.catalogue.strategies import find_strategy
from shoal.config.schema import ParallelConfig
from shoal.mistakes import UserMistake

# What is sharded over the ranks along an axis. Ranks with different shards of the batch or of its sequences compute
# gradients of the same weights from different tokens; ranks with shards of the same matrices compute the same loss.
Sharded = Literal["layers", "batch", "sequences", "matrices"]


def _axis(shards: Sharded) -> Any:
    return field(default=1, metadata={"shards": shards})


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism; their product is the number of processes.

    The fields are the table of axes: a new axis is one line here. Slowest links outermost: pipeline stages communicate
    least, tensor-parallel ranks most.
    """

    pp: int = _axis("layers")
    dp_replicate: int = _axis("batch")
    dp_shard: int = _axis("batch")
    cp: int = _axis("sequences")
    tp: int = _axis("matrices")

    def __post_init__(self) -> None:
        assert all(isinstance(degree, int) and degree >= 1 for degree in self.degrees.values()), self

    @property
    def degrees(self) -> dict[str, int]:
        """By axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.size(AXES)

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: processes, or groups of them, with different sequences."""
        return self.size(BATCH_AXES)

    @property
    def gradient_ranks(self) -> int:
        """The number of ranks that compute gradients of the same weights from different tokens."""
        return self.size(TOKEN_AXES)

    @property
    def shards(self) -> int:
        """The number of ranks that FSDP shards a model over."""
        return self.size(SHARD_AXES)

    @property
    def sharded_replicas(self) -> int:
        """The number of replicas of a model that FSDP has sharded."""
        return self.size(REPLICA_AXES)

    def size(self, axes: Iterable[str]) -> int:
        """The number of ranks that differ only along `axes`."""
        return prod(getattr(self, axis) for axis in axes)

    def coordinate(self, rank: int) -> dict[str, int]:
        """The index of `rank` along each axis."""
        found = {}
        for axis, degree in reversed(self.degrees.items()):
            rank, found[axis] = divmod(rank, degree)
        return {axis: found[axis] for axis in self.degrees}


def _axes(*shards: Sharded) -> tuple[str, ...]:
    return tuple(axis.name for axis in fields(Mesh) if axis.metadata["shards"] in shards)


AXES = tuple(axis.name for axis in fields(Mesh))
BATCH_AXES = _axes("batch")
TOKEN_AXES = _axes("batch", "sequences")
SAME_LOSS_AXES = _axes("matrices")
# FSDP shards over these. Over the other ranks with different tokens the sharded model is replicated.
SHARD_AXES = ("dp_shard", "cp")
REPLICA_AXES = tuple(axis for axis in TOKEN_AXES if axis not in SHARD_AXES)
# Axes whose degree is a key of `parallel`, in the order in which they are shown; the others share what these leave.
CONFIGURED_AXES = tuple(key for key in ParallelConfig.model_fields if key in AXES)


def mesh_for(parallel: ParallelConfig, strategy: str, world_size: int, nodes: int = 1) -> Mesh:
    """The mesh of `world_size` processes on `nodes` nodes under `strategy`, which is not auto."""
    assert world_size >= 1, world_size
    if strategy == "single" and world_size > 1:
        raise UserMistake(
            f"parallel.strategy single runs one process, but there are {world_size}: use ddp, fsdp or auto."
        )
    data_parallel = divide_processes(parallel, world_size)
    replicate = _replicas(parallel, strategy, data_parallel, nodes)
    mesh = Mesh(dp_replicate=replicate, dp_shard=data_parallel // replicate, **configured_degrees(parallel))
    shards = mesh.shards
    reshards = (found := find_strategy(strategy)).fully_shard and not found.keeps_weights
    if reshards and not isinstance(parallel.reshard, bool | str) and shards % parallel.reshard:
        raise UserMistake(
            f"parallel.reshard {parallel.reshard} does not divide the {shards} processes over which the model is "
            "sharded; use true, false or a number that does."
        )
    return mesh


def divide_processes(parallel: ParallelConfig, world_size: int) -> int:
    """The data-parallel degree that `tp`, `pp` and `cp` leave of `world_size` processes."""
    degrees = configured_degrees(parallel)
    within = prod(degrees.values())
    if world_size % within:
        near = [count for count in (world_size // within * within, -(-world_size // within) * within) if count]
        raise UserMistake(
            f"{_processes(world_size)} cannot be split into groups of {within} "
            f"(parallel.{' × '.join(f'{axis} {degree}' for axis, degree in degrees.items())}): use "
            f"{' or '.join(_processes(count) for count in near)}, or smaller degrees."
        )
    return world_size // within


def configured_degrees(parallel: ParallelConfig) -> dict[str, int]:
    """The degrees of the axes that are keys of `parallel`."""
    return {axis: getattr(parallel, axis) for axis in CONFIGURED_AXES}


def length_multiple(parallel: ParallelConfig, precision: str) -> int:
    """Sequences are padded to a multiple of this, so that all `cp` and `tp` ranks have the same number of tokens; fp8
    matmuls need multiples of 16."""
    units = 16 if precision == "fp8" else 1
    if parallel.cp == 1:
        return lcm(parallel.tp, units)
    # The load-balanced order gives each rank two chunks of a sequence.
    chunks = lcm(2, parallel.tp) if parallel.cp_method == "gather" else parallel.tp
    return parallel.cp * lcm(chunks, units)


def _replicas(parallel: ParallelConfig, strategy: str, data_parallel: int, nodes: int) -> int:
    """The number of replicas of the sharded model."""
    if not find_strategy(strategy, parallel.sharding).fully_shard:
        return data_parallel
    if not find_strategy(strategy).takes_sharding or parallel.sharding != "hybrid_shard":
        return 1
    # A pipeline is split across nodes first: each stage has some of them.
    stage_nodes = max(1, nodes // parallel.pp)
    replicas = stage_nodes if parallel.replicate == "auto" else parallel.replicate
    if data_parallel % replicas:
        source = f"the {stage_nodes} nodes" if parallel.replicate == "auto" else f"parallel.replicate {replicas}"
        raise UserMistake(
            f"hybrid_shard: {source} do not divide the {data_parallel} data-parallel processes; set "
            "parallel.replicate to a number that does."
        )
    return replicas


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
