"""The device mesh of each strategy."""

import numpy as np
import pytest

from shoal.config import Mesh, mesh_for
from shoal.config.mesh import length_multiple
from shoal.config.schema import ParallelConfig
from shoal.mistakes import UserMistake


@pytest.mark.parametrize(
    ("degrees", "strategy", "world_size", "expected"),
    [
        ({}, "single", 1, Mesh()),
        ({}, "ddp", 1, Mesh()),
        ({}, "ddp", 8, Mesh(dp_replicate=8)),
        ({}, "fsdp", 8, Mesh(dp_shard=8)),
        ({}, "zero3", 4, Mesh(dp_shard=4)),
        ({"tp": 2, "pp": 3}, "ddp", 12, Mesh(pp=3, dp_replicate=2, tp=2)),
        ({"tp": 2, "cp": 4}, "fsdp", 32, Mesh(dp_shard=4, cp=4, tp=2)),
        ({"sharding": "no_shard"}, "fsdp", 4, Mesh(dp_replicate=4)),
        ({}, "zero1", 4, Mesh(dp_replicate=4)),
        ({}, "zero2", 4, Mesh(dp_shard=4)),
        ({"sharding": "hybrid_shard", "replicate": 2}, "fsdp", 8, Mesh(dp_replicate=2, dp_shard=4)),
        # Under ddp the sharding has no effect.
        ({"sharding": "hybrid_shard", "replicate": 2}, "ddp", 8, Mesh(dp_replicate=8)),
    ],
)
def test_a_strategy_is_a_mesh_over_all_processes(
    degrees: dict[str, object], strategy: str, world_size: int, expected: Mesh
) -> None:
    mesh = mesh_for(ParallelConfig.model_validate(degrees), strategy, world_size)
    assert mesh == expected
    assert mesh.world_size == world_size


def test_data_parallel_counts_replicas_and_shards() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    assert mesh.data_parallel == 15
    assert mesh.gradient_ranks == mesh.shards * mesh.sharded_replicas == 105
    assert mesh.world_size == 2310


def test_tensor_parallel_ranks_are_adjacent_and_pipeline_stages_farthest_apart() -> None:
    mesh = Mesh(pp=2, dp_replicate=3, dp_shard=5, cp=7, tp=11)
    for rank in (0, 1, 11, 76, 77, 384, 385, 1154, 1155, 2309):
        pp, dp_replicate, dp_shard, cp, tp = map(int, np.unravel_index(rank, (2, 3, 5, 7, 11)))
        expected = {"pp": pp, "dp_replicate": dp_replicate, "dp_shard": dp_shard, "cp": cp, "tp": tp}
        assert mesh.coordinate(rank) == expected
        assert [*mesh.coordinate(rank)] == [*expected], "in the order of the DeviceMesh"


@pytest.mark.parametrize(
    ("degrees", "strategy", "world_size", "says"),
    [
        ({}, "single", 2, "single runs one process, but there are 2"),
        ({"tp": 3}, "fsdp", 8, "8 processes cannot be split into groups of 3"),
        ({"tp": 2, "pp": 2}, "ddp", 2, r"groups of 4 \(parallel.tp 2 × pp 2 × cp 1\)"),
        ({"tp": 2}, "ddp", 1, "1 process cannot be split"),
        ({"sharding": "hybrid_shard", "replicate": 3}, "fsdp", 8, "parallel.replicate 3 do not divide the 8"),
        ({"tp": 3}, "fsdp", 8, "use 6 processes or 9 processes, or smaller degrees"),
        ({"reshard": 3}, "fsdp", 8, "reshard 3 does not divide the 8 processes"),
        ({"reshard": 3}, "zero3", 8, "reshard 3 does not divide the 8 processes"),
    ],
)
def test_processes_that_the_degrees_do_not_divide_are_refused(
    degrees: dict[str, object], strategy: str, world_size: int, says: str
) -> None:
    with pytest.raises(UserMistake, match=says):
        mesh_for(ParallelConfig.model_validate(degrees), strategy, world_size)


def test_a_degree_below_one_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError):
        Mesh(tp=0)


def test_hybrid_sharding_replicates_over_nodes() -> None:
    hybrid = ParallelConfig.model_validate({"sharding": "hybrid_shard"})
    assert mesh_for(hybrid, "fsdp", 16, nodes=2) == Mesh(dp_replicate=2, dp_shard=8)
    assert mesh_for(hybrid, "fsdp", 8) == Mesh(dp_shard=8)
    deep = ParallelConfig.model_validate({"sharding": "hybrid_shard", "pp": 2})
    assert mesh_for(deep, "fsdp", 32, nodes=4) == Mesh(pp=2, dp_replicate=2, dp_shard=8)
    with pytest.raises(UserMistake, match="the 3 nodes do not divide the 8 data-parallel processes"):
        mesh_for(hybrid, "fsdp", 8, nodes=3)


@pytest.mark.parametrize(
    ("degrees", "precision", "multiple"),
    [
        ({}, "bf16-mixed", 1),
        ({"tp": 4}, "bf16-mixed", 4),
        ({"cp": 2}, "bf16-mixed", 4),
        ({"cp": 2, "tp": 3}, "bf16-mixed", 12),
        ({"cp": 3, "tp": 2, "cp_method": "ulysses"}, "bf16-mixed", 6),
        ({}, "fp8", 16),
        ({"tp": 3}, "fp8", 48),
        ({"cp": 2}, "fp8", 32),
    ],
)
def test_sequences_are_padded_so_that_every_rank_has_the_same_number_of_tokens(
    degrees: dict[str, object], precision: str, multiple: int
) -> None:
    assert length_multiple(ParallelConfig.model_validate(degrees), precision) == multiple
