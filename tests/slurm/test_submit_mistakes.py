"""What a cluster cannot run is refused before it is submitted, with what there is."""

from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import shoal, tiny

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "slurm.partition=debgu",
            "slurm.partition debgu does not exist: the partitions are debug, urgent. Did you mean debug?",
        ),
        (
            "hardware.devices=4",
            "hardware.devices is 4, but no node of partition debug has more than 2 GPUs; ask for fewer, with more "
            "hardware.nodes.",
        ),
        ("hardware.nodes=4", "hardware.nodes is 4, but partition debug has 2 such nodes."),
        (
            "slurm.cpus_per_task=8",
            "slurm.cpus_per_task 8 × 1 devices per node is more than the 4 CPUs of a node of partition debug; set "
            "slurm.cpus_per_task to at most 4.",
        ),
        (
            "slurm.time=2-00:00:00",
            "slurm.time 2-00:00:00 is longer than partition debug allows, which is 24 hours; a run that reaches its "
            "time limit is requeued and resumes, so set a shorter one.",
        ),
    ],
)
def test_what_the_cluster_does_not_have(
    override: str, sentence: str, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tiny(text)))
    done = shoal(cluster, tmp_path, "submit", "run.yaml", override)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"shoal: {sentence}\n")
    assert not (tmp_path / "runs").exists()
