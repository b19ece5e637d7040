"""The device mesh of a run: degrees of parallelism in five dimensions. Arithmetic only."""

from dataclasses import dataclass
from math import lcm, prod

from shoal.catalogue.strategies import find_strategy
from shoal.config.schema import ParallelConfig
from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Mesh:
    """Degrees of parallelism, outermost first; their product is the number of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        assert all(isinstance(degree, int) and degree >= 1 for degree in self.degrees), self

    @property
    def degrees(self) -> tuple[int, int, int, int, int]:
        return (self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return prod(self.degrees)

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: processes, or groups of them, with different sequences."""
        return self.dp_replicate * self.dp_shard


def mesh_for(parallel: ParallelConfig, strategy: str, world_size: int, nodes: int = 1) -> Mesh:
    """The mesh of `world_size` processes on `nodes` nodes under `strategy`, which is not auto."""
    assert world_size >= 1, world_size
    if strategy == "single" and world_size > 1:
        raise UserMistake(
            f"parallel.strategy single runs one process, but there are {world_size}: use ddp, fsdp or auto."
        )
    data_parallel = divide_processes(parallel, world_size)
    replicate = _replicas(parallel, strategy, data_parallel, nodes)
    mesh = Mesh(
        pp=parallel.pp, dp_replicate=replicate, dp_shard=data_parallel // replicate, cp=parallel.cp, tp=parallel.tp
    )
    shards = mesh.dp_shard * mesh.cp
    reshards = (found := find_strategy(strategy)).fully_shard and not found.keeps_weights
    if reshards and not isinstance(parallel.reshard, bool | str) and shards % parallel.reshard:
        raise UserMistake(
            f"parallel.reshard {parallel.reshard} does not divide the {shards} processes over which the model is "
            "sharded; use true, false or a number that does."
        )
    return mesh


def divide_processes(parallel: ParallelConfig, world_size: int) -> int:
    """The data-parallel degree that `tp`, `pp` and `cp` leave of `world_size` processes."""
    within = parallel.tp * parallel.pp * parallel.cp
    if world_size % within:
        near = [count for count in (world_size // within * within, -(-world_size // within) * within) if count]
        raise UserMistake(
            f"{_processes(world_size)} cannot be split into groups of {within} "
            f"(parallel.tp {parallel.tp} × pp {parallel.pp} × cp {parallel.cp}): use "
            f"{' or '.join(_processes(count) for count in near)}, or smaller degrees."
        )
    return world_size // within


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
