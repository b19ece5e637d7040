"""A sweep as a job array: one task per member, those that failed submitted again alone."""

import json
from pathlib import Path

import pytest
import yaml

from tests.launch.command import training_lines
from tests.slurm.cluster import Cluster, freeze, task_processes, thaw, wait_until
from tests.slurm.jobs import STEPS, shoal, tiny

pytestmark = pytest.mark.slow


def states(folder: Path) -> dict[str, str]:
    return {one["name"]: one["state"] for one in json.loads((folder / "sweep.json").read_text())["members"]}


def test_an_array_trains_each_member_and_those_that_failed_or_were_cancelled_are_submitted_alone(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    config = tiny(text, hardware={"nodes": 1, "devices": 1})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    # The first try of one member fails before it trains.
    broken = tmp_path / "broken"
    setup = f'[ "$SLURM_ARRAY_TASK_ID" != 1 ] || [ -e {broken} ] || {{ touch {broken}; exit 9; }}'
    command = ["sweep", "run.yaml", "train.lr=1e-3,3e-3,1e-2", f"slurm.setup=[{json.dumps(setup)}]", "--on", "slurm"]
    folder = tmp_path / "runs" / "run-sweep"
    names = ["00-lr-1e-3", "01-lr-3e-3", "02-lr-1e-2"]

    dry = shoal(cluster, tmp_path, *command, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "#SBATCH --array=0-2" in dry.stdout
    assert not folder.exists()

    started = shoal(cluster, tmp_path, *command)
    assert started.returncode == 0, started.stderr
    job = started.stderr.removeprefix("job array ").partition(",")[0]
    assert states(folder) == dict.fromkeys(names, "submitted")
    cancelled = folder / names[2]
    wait_until(lambda: len(training_lines(cancelled)) > 1, "a member trains")
    cancel_member(cluster, tmp_path, f"{job}_2", cancelled)
    wait_until(lambda: cluster.run("squeue", "--noheader", f"--jobs={job}") == "", f"array {job} ends")

    seen = shoal(cluster, tmp_path, *command)
    assert seen.returncode == 1, seen.stderr
    assert states(folder) == {names[0]: "done", names[1]: "failed", names[2]: "failed"}, seen.stdout + seen.stderr
    assert f"{names[2]}: Slurm says that its job was cancelled; see " in seen.stdout
    assert len(training_lines(folder / names[0])) == STEPS
    told = shoal(cluster, tmp_path, "status", f"runs/run-sweep/{names[0]}")
    assert "finished" in told.stdout, told.stdout + told.stderr
    assert f"step {STEPS}/{STEPS}" in shoal(cluster, tmp_path, "logs", f"runs/run-sweep/{names[0]}").stdout

    again = shoal(cluster, tmp_path, *command, "--retry-failed")
    assert "--array=1-2," in again.stderr, again.stderr
    job = again.stderr.removeprefix("job array ").partition(",")[0]
    wait_until(lambda: cluster.run("squeue", "--noheader", f"--jobs={job}") == "", f"array {job} ends")
    seen = shoal(cluster, tmp_path, *command, "--json")
    assert seen.returncode == 0, seen.stderr
    found = json.loads(seen.stdout)
    members = sorted(found["members"], key=lambda one: one["name"])
    assert [(one["state"], one["attempts"]) for one in members] == [("done", 1), ("done", 2), ("done", 2)]
    assert found["best"] is not None
    assert (folder / "best.yaml").is_file()
    logged = (cancelled / "metrics.jsonl").read_text().count('"loss"')
    assert logged == STEPS, "the cancelled member has not gone on with its next step"


def cancel_member(cluster: Cluster, folder: Path, job: str, run: Path) -> None:
    """`shoal cancel` of one member, while it trains: it saves, and is not requeued."""
    shown = cluster.run("scontrol", "show", "job", job)
    frozen = task_processes(shown.split()[0].removeprefix("JobId="), 0)
    assert frozen, shown
    for process in frozen:
        freeze(process)
    done = shoal(cluster, folder, "cancel", str(run))
    for process in frozen:
        thaw(process)
    assert done.returncode == 0, done.stderr
    cluster.wait_for(job, "CANCELLED")
    found = json.loads(shoal(cluster, folder, "status", str(run), "--json").stdout)
    assert found["state"] == "cancelled"
    assert found["checkpoint"] == max(training_lines(run)) < STEPS
