"""Who does what: the devices of a run as a grid of five dimensions. Arithmetic only."""

from dataclasses import dataclass
from math import prod

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
        """Processes in the run."""
        return prod(self.degrees)

    @property
    def data_parallel(self) -> int:
        """Processes, or groups of them, that see different rows."""
        return self.dp_replicate * self.dp_shard


def mesh_for(parallel: ParallelConfig, strategy: str, world_size: int) -> Mesh:
    """The mesh of `world_size` processes under `strategy`, which is a name other than auto."""
    assert world_size >= 1, world_size
    if strategy == "single" and world_size > 1:
        raise UserMistake(
            f"parallel.strategy single runs one process, but there are {world_size}: use ddp, fsdp or auto."
        )
    within = parallel.tp * parallel.pp * parallel.cp
    if world_size % within:
        raise UserMistake(
            f"{_processes(world_size)} cannot be divided into groups of {within} "
            f"(parallel.tp {parallel.tp} × pp {parallel.pp} × cp {parallel.cp})."
        )
    data_parallel = world_size // within
    replicate = _replicas(parallel, strategy, data_parallel)
    return Mesh(
        pp=parallel.pp, dp_replicate=replicate, dp_shard=data_parallel // replicate, cp=parallel.cp, tp=parallel.tp
    )


def _replicas(parallel: ParallelConfig, strategy: str, data_parallel: int) -> int:
    """How many copies of the sharded model there are."""
    if strategy in ("single", "ddp") or (strategy == "fsdp" and parallel.sharding == "no_shard"):
        return data_parallel
    assert strategy in ("fsdp", "zero1", "zero2", "zero3"), f"no mesh for the strategy {strategy}"
    if strategy != "fsdp" or parallel.sharding != "hybrid_shard":
        return 1
    if parallel.replicate == "auto":
        raise UserMistake("parallel.sharding hybrid_shard needs parallel.replicate, the number of replicas.")
    if data_parallel % parallel.replicate:
        raise UserMistake(
            f"parallel.replicate {parallel.replicate} does not divide the {data_parallel} data-parallel processes."
        )
    return parallel.replicate


def _processes(count: int) -> str:
    return "1 process" if count == 1 else f"{count} processes"
