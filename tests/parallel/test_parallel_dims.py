"""The device mesh of torch and its process groups follow the table of axes."""

from collections.abc import Iterator
from math import prod

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.config.mesh import AXES, Mesh
from shoal.parallel.parallel_dims import FLATTENED, ParallelDims
from shoal.parallel.ranks import Ranks

MESH = Mesh(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
RANK = 29


@pytest.fixture
def parallel_dims() -> Iterator[ParallelDims]:
    """Those of one rank of many, of which the others do not exist."""
    dist.init_process_group("fake", rank=RANK, world_size=MESH.world_size, store=FakeStore())
    try:
        yield ParallelDims(MESH, Ranks(RANK, MESH.world_size, 0, torch.device("cpu")))
    finally:
        dist.destroy_process_group()


def test_every_axis_is_a_dimension_of_the_device_mesh_in_the_order_of_the_table(parallel_dims: ParallelDims) -> None:
    device_mesh = parallel_dims.device_mesh
    assert device_mesh.mesh_dim_names == AXES
    assert tuple(device_mesh.shape) == tuple(MESH.degrees.values())
    assert tuple(device_mesh.get_coordinate() or ()) == tuple(parallel_dims.coordinate.values())


@pytest.mark.parametrize("axis", AXES)
def test_every_axis_has_a_process_group_of_the_ranks_that_differ_along_it(
    axis: str, parallel_dims: ParallelDims
) -> None:
    group = parallel_dims.group(axis)
    assert group is not None
    others = [MESH.coordinate(rank) for rank in dist.get_process_group_ranks(group)]
    expected = [{**parallel_dims.coordinate, axis: index} for index in range(MESH.degrees[axis])]
    assert others == expected


def test_flattened_dimensions_are_consecutive_axes(parallel_dims: ParallelDims) -> None:
    for axes in FLATTENED.values():
        first = AXES.index(axes[0])
        assert AXES[first : first + len(axes)] == axes
    assert parallel_dims.sharding.mesh_dim_names == ("dp_replicas", "dp_shard_cp")
    assert tuple(parallel_dims.sharding.shape) == (2, 6)
    assert parallel_dims.replicas.size() == MESH.gradient_ranks == prod((2, 3, 2))


def test_fsdp_and_ddp_average_over_all_ranks_with_other_tokens(parallel_dims: ParallelDims) -> None:
    assert min(MESH.degrees.values()) > 1, "a new axis is tested too"
    assert parallel_dims.sharding.size() == parallel_dims.replicas.size() == MESH.gradient_ranks


def test_an_axis_of_one_rank_needs_no_group() -> None:
    alone = ParallelDims(Mesh(), Ranks(0, 1, 0, torch.device("cpu")))
    assert all(alone.group(axis) is None for axis in AXES)
    assert alone.coordinate == dict.fromkeys(AXES, 0)
