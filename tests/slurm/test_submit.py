"""`shoal submit`, `status`, `logs` and `cancel` on a real Slurm."""

import json
import re
from pathlib import Path

import pytest

from tests.launch.command import training_lines
from tests.slurm.cluster import Cluster, job_processes, thaw, wait_until
from tests.slurm.jobs import STEPS, shoal, submit, tiny

pytestmark = pytest.mark.slow


def test_tasks_of_two_nodes_join_and_train_in_a_folder_with_a_space(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "it's a folder, 100% odd"
    folder.mkdir()
    config = tiny(text, hardware={"nodes": 2, "devices": 2}, train={"micro_batch": 2})
    setup = ["echo set up on $(hostname)", "export GREETING='so it'"]
    config["slurm"] |= {"setup": setup, "env": {"ODD": "a 'b' $c"}, "extra": ["--comment=tiny"]}
    config["slurm"] |= {"cpu_bind": "verbose,cores"}
    job = submit(cluster, folder, config)
    following = shoal(cluster, folder, "logs", "--follow", "run")
    cluster.wait_for(job.id, "COMPLETED", log=job.log)
    assert following.stdout == job.said()
    assert "set up on n1" in job.said()
    bound = re.findall(r"cpu-bind=MASK - (n\d), task +(\d) .+: mask 0x\w+ set", job.said())
    assert sorted(bound) == [("n1", "0"), ("n1", "1"), ("n2", "2"), ("n2", "3")], job.said()
    assert f" {STEPS} of {STEPS}, " in job.said()
    plan = json.loads((job.run / "plan.json").read_text())
    assert plan["chosen"]["world_size"] == 4
    assert {path.name for path in (job.run / "logs").glob("rank-*.log")} == {"rank-1.log", "rank-2.log", "rank-3.log"}
    assert "ODD='a '\"'\"'b'\"'\"' $c'" in (job.run / "job.sbatch").read_text()
    found = json.loads(shoal(cluster, folder, "status", "run", "--json").stdout)
    assert (found["state"], found["step"], found["job"], found["nodes"]) == ("finished", STEPS, job.id, "n[1-2]")
    again = shoal(cluster, folder, "submit", "run.yaml")
    assert again.returncode == 2
    assert again.stderr.endswith(
        "already holds a run; add --resume to continue it, --overwrite to delete it, or another name=…\n"
    )


def test_a_cancelled_job_saves_is_not_requeued_and_leaves_nothing_behind(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    # A script that goes on after TERM, as with a trap that cleans up: its end must not ask for another start.
    job = submit(cluster, tmp_path, tiny(text, slurm={"setup": ["trap 'echo cleaned up' TERM"]}))
    frozen = job.frozen_at(2)
    second = shoal(cluster, tmp_path, "submit", "run.yaml", "--resume")
    assert second.returncode == 2
    assert f"job {job.id}" in second.stderr or "Another process is training" in second.stderr
    cancelled = shoal(cluster, tmp_path, "cancel", "run")
    assert cancelled.returncode == 0, cancelled.stderr
    for process in frozen:
        thaw(process)
    cluster.wait_for(job.id, "CANCELLED", log=job.log)
    wait_until(lambda: job_processes(job.id) == [], f"no process of job {job.id} is left")
    assert "cleaned up" in job.said()
    found = json.loads(shoal(cluster, tmp_path, "status", "run", "--json").stdout)
    assert found["state"] == "cancelled"
    assert found["checkpoint"] == max(training_lines(job.run)) < STEPS
    again = shoal(cluster, tmp_path, "cancel", "run")
    assert (again.returncode, again.stderr) == (
        2,
        "shoal: run does not run and waits for nothing: it is cancelled.\n",
    )
    new = submit(cluster, tmp_path, tiny(text, train={"steps": 2}, hardware={"nodes": 1}), "--overwrite")
    assert (tmp_path / "runs" / "run~replaced" / "metrics.jsonl").is_file()
    cluster.wait_for(new.id, "COMPLETED", log=new.log)
    assert set(training_lines(new.run)) == {1, 2}
    assert not (tmp_path / "runs" / "run~replaced").exists()


def test_a_job_that_fails_says_why(cluster: Cluster, tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text("many swimmers\n" * 100)
    config = tiny(data, hardware={"nodes": 1})
    config["slurm"]["setup"] = [f"rm {data}"]
    job = submit(cluster, tmp_path, config)
    cluster.wait_for(job.id, "FAILED", log=job.log)
    found = json.loads(shoal(cluster, tmp_path, "status", "run", "--json").stdout)
    assert found["state"] == "failed"
    assert str(data) in found["detail"]
    table = shoal(cluster, tmp_path, "status").stdout.splitlines()
    assert table[1].split()[:2] == ["run", "failed"]
    assert table[2].strip() == found["detail"]
