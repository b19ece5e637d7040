"""`srun shoal doctor`: the nodes of a job are examined together, and one task prints."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import SHOAL

pytestmark = pytest.mark.slow


def test_the_tasks_of_two_nodes_examine_their_nodes_and_the_links_between_them(
    cluster: Cluster, tmp_path: Path
) -> None:
    layout = ["--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=1"]
    done = subprocess.run(
        ["srun", *layout, *SHOAL, "doctor", "--json"],
        cwd=tmp_path,
        env={**os.environ, **cluster.environment, "SHOAL_CACHE": str(tmp_path / "cache"), "NCCL_SOCKET_IFNAME": "ib7"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = json.loads(done.stdout)["findings"]  # of one task alone
    by_name = {one["check"]: one for one in found}
    assert by_name["ranks"]["found"] == "4 joined, on 2 nodes"
    for name in ("same versions", "shared folder", "clock skew", "within nodes", "all-reduce"):
        assert by_name[name]["status"] == "ok", by_name[name]
    assert by_name["shared folder"]["found"] == f"{tmp_path}/runs is the same on all nodes"
    network = [one for one in found if one["check"] == "network"]
    assert [one["status"] for one in network] == ["failure", "failure"], "on both nodes"
    assert network[1]["found"].startswith("n2: NCCL_SOCKET_IFNAME is ib7, but ")
    assert done.returncode == 3
    assert done.stderr.count("all-reduce        16 MiB") == 2, "within a node, and over all"
