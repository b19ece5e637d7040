"""Training as a task of submitit, and by Hydra's launcher on top of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from tests.harness import reference_run, weights
from tests.launch.command import training_lines
from tests.slurm.cluster import Cluster, freeze, task_processes, thaw, wait_until
from tests.slurm.jobs import STEPS, tiny

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]

SUBMIT = """
import submitit
from shoal.launch import submitit_task

executor = submitit.AutoExecutor(folder="jobs", cluster="slurm")
executor.update_parameters(nodes=2, tasks_per_node=1, cpus_per_task=1, timeout_min=30, slurm_signal_delay_s=60)
print(executor.submit(submitit_task("run.yaml")).job_id)
"""


def python(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **cluster.environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_preempted_task_is_requeued_and_ends_as_if_undisturbed(cluster: Cluster, text: Path, tmp_path: Path) -> None:
    pytest.importorskip("submitit")
    config = tiny(text)
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "submit.py").write_text(SUBMIT)
    job = python(cluster, tmp_path, "submit.py").stdout.strip()
    run = tmp_path / "runs" / "run"

    def said() -> str:
        return "\n".join(file.read_text() for file in sorted((tmp_path / "jobs").glob(f"{job}_*_log.*")))

    wait_until(lambda: max(training_lines(run), default=0) >= 3, "step 3", said)
    frozen = task_processes(job, 1)
    assert frozen
    for process in frozen:
        freeze(process)
    # Preempted by a job of a partition with precedence, with a grace period.
    cluster.run("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    wait_until(lambda: "Stopping after this step" in said(), "the run is asked to stop", said)
    for process in frozen:
        thaw(process)
    cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")
    assert cluster.state(job) == "COMPLETED", said()
    lines = training_lines(run)
    assert set(lines) == set(range(1, STEPS + 1))
    assert min(step for step, line in lines.items() if line["attempt"] > 0) > 3
    assert (run / "metrics.jsonl").read_text().count('"loss"') == STEPS, "a step was computed twice"
    assert (tmp_path / "jobs" / f"{job}_0_result.pkl").is_file(), "submitit has its result"
    undisturbed = weights(reference_run({**config, "hardware": {}, "slurm": {}}, world_size=2))
    found = weights(run)
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], undisturbed[name]) for name in found)


def test_a_multirun_of_hydra_trains_its_members_as_jobs(cluster: Cluster, tmp_path: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    project = tmp_path / "project"
    shutil.copytree(ROOT / "examples" / "hydra", project, ignore=shutil.ignore_patterns("runs", "multirun"))
    launcher = ["hydra/launcher=submitit_slurm", "hydra.launcher.timeout_min=30", "hydra.launcher.cpus_per_task=1"]
    # Two tasks each, which join.
    launcher += ["hydra.launcher.tasks_per_node=2", "trainer.micro_batch=2"]
    python(cluster, project, "train.py", "-m", "trainer.lr=1e-4,3e-4", "trainer.steps=4", *launcher)
    runs = project / "runs"
    assert sorted(run.name for run in runs.iterdir() if run.is_dir()) == ["lr-0.0001", "lr-0.0003"]
    for run in runs.glob("lr-*"):
        assert set(training_lines(run)) == {1, 2, 3, 4}
        assert (run / "logs" / "rank-1.log").exists(), "two ranks"
    assert len({training_lines(run)[4]["lr"] for run in runs.glob("lr-*")}) == 2
