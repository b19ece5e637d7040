"""Tasks of the real srun know their ranks, whatever their layout."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_mpi import PROGRAM
from tests.slurm.cluster import Cluster

pytestmark = pytest.mark.slow


def placements(cluster: Cluster, folder: Path, *layout: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        ["srun", *layout, sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, **cluster.environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return sorted(map(json.loads, done.stdout.splitlines()), key=lambda one: int(one["rank"]))


@pytest.mark.parametrize(
    ("layout", "local"),
    [
        (["--nodes=2", "--ntasks-per-node=2"], [(0, 2), (1, 2), (0, 2), (1, 2)]),
        (["--nodes=2", "--ntasks-per-node=1"], [(0, 1), (0, 1)]),
        (["--nodes=2", "--ntasks=3"], [(0, 2), (1, 2), (0, 1)]),
    ],
    ids=["one task per device", "one task per node", "uneven"],
)
def test_every_layout_of_tasks(
    layout: list[str], local: list[tuple[int, int]], cluster: Cluster, tmp_path: Path
) -> None:
    found = placements(cluster, tmp_path, *layout)
    assert [(one["local_rank"], one["local_world_size"]) for one in found] == local
    assert [one["rank"] for one in found] == list(range(len(local)))
    assert {one["world_size"] for one in found} == {len(local)}
    assert {(one["started_by"], one["master_addr"]) for one in found} == {("srun", "n1")}
    assert len({(one["launch"], one["master_port"]) for one in found}) == 1
