"""A sweep as a job array: one task per member, those that failed submitted again alone."""

import json
from pathlib import Path

import pytest
import yaml

from tests.launch.command import training_lines
from tests.slurm.cluster import Cluster, wait_until
from tests.slurm.jobs import shoal, tiny

pytestmark = pytest.mark.slow


def states(folder: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in json.loads((folder / "sweep.json").read_text())["members"]}


def test_an_array_trains_each_member_and_failed_ones_are_submitted_alone(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    config = tiny(text, train={"steps": 3}, hardware={"nodes": 1, "devices": 1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    # The first try of one member fails before it trains.
    broken = tmp_path / "broken"
    setup = f'[ "$SLURM_ARRAY_TASK_ID" != 1 ] || [ -e {broken} ] || {{ touch {broken}; exit 9; }}'
    command = ["sweep", "run.yaml", "train.lr=1e-3,3e-3", f"slurm.setup=[{json.dumps(setup)}]", "--on", "slurm"]
    folder = tmp_path / "runs" / "run-sweep"

    dry = shoal(cluster, tmp_path, *command, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "#SBATCH --array=0-1" in dry.stdout
    assert not folder.exists()

    started = shoal(cluster, tmp_path, *command)
    assert started.returncode == 0, started.stderr
    job = started.stderr.removeprefix("job array ").partition(",")[0]
    assert states(folder) == {"00-lr-1e-3": "submitted", "01-lr-3e-3": "submitted"}
    wait_until(lambda: cluster.run("squeue", "--noheader", f"--jobs={job}") == "", f"array {job} ends")

    seen = shoal(cluster, tmp_path, *command)
    assert seen.returncode == 1, seen.stderr
    assert states(folder) == {"00-lr-1e-3": "done", "01-lr-3e-3": "failed"}, seen.stdout + seen.stderr
    assert len(training_lines(folder / "00-lr-1e-3")) == 3
    told = shoal(cluster, tmp_path, "status", "runs/run-sweep/00-lr-1e-3")
    assert "finished" in told.stdout, told.stdout + told.stderr
    assert "step 3/3" in shoal(cluster, tmp_path, "logs", "runs/run-sweep/00-lr-1e-3").stdout
    again = shoal(cluster, tmp_path, *command, "--retry-failed")
    assert "--array=1," in again.stderr, again.stderr
    job = again.stderr.removeprefix("job array ").partition(",")[0]
    wait_until(lambda: cluster.run("squeue", "--noheader", f"--jobs={job}") == "", f"array {job} ends")
    seen = shoal(cluster, tmp_path, *command, "--json")
    assert seen.returncode == 0, seen.stderr
    found = json.loads(seen.stdout)
    assert [(one["state"], one["attempts"]) for one in sorted(found["members"], key=lambda one: one["name"])] == [
        ("done", 1),
        ("done", 2),
    ]
    assert found["best"] is not None
    assert (folder / "best.yaml").is_file()
