"""Ranks as the real mpirun of Open MPI and of MPICH starts them."""

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

PROGRAM = (
    "import dataclasses, json, os; from shoal.launch.environment import read_placement; "
    # In one write: lines of two processes at once are mixed.
    "os.write(1, (json.dumps(dataclasses.asdict(read_placement(os.environ))) + chr(10)).encode())"
)
MPIRUN = {
    "Open MPI": ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe"],
    "MPICH or Intel MPI": ["mpirun.mpich"],
}


def ranks(name: str, *wrapper: str) -> list[dict[str, Any]]:
    command = MPIRUN[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}: apt-get install openmpi-bin mpich")
    arguments = [*command, "-n", "2", *wrapper, sys.executable, "-c", PROGRAM]
    kept = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(arguments, env=kept, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return sorted(map(json.loads, done.stdout.splitlines()), key=lambda one: one["rank"])


@pytest.mark.slow
@pytest.mark.parametrize("name", MPIRUN)
def test_mpirun_gives_each_process_its_rank_and_each_launch_a_name(name: str) -> None:
    first, second = ranks(name)
    assert first == {**second, "rank": 0, "local_rank": 0}
    expected = {"rank": 1, "world_size": 2, "local_rank": 1, "local_world_size": 2, "master_addr": "127.0.0.1"}
    assert second == {**second, **expected, "started_by": name}
    # Two at once on one machine must not meet.
    assert ranks(name, "nice")[0]["launch"] != first["launch"]
