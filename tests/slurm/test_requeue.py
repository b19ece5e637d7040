"""A job that Slurm stops saves a checkpoint, is requeued, and resumes at that step."""

from pathlib import Path

import pytest
import torch

from tests.harness import reference_run, weights
from tests.launch.command import training_lines
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import STEPS, Job, submit, tiny

pytestmark = pytest.mark.slow

SIGNAL, LONG = 150, "TimeLimit=60"


def by_time_limit(job: Job, frozen: list[int]) -> None:
    # Slurm looks twice a minute for jobs that end within the time of --signal, and then sends it.
    elapsed = job.cluster.run("squeue", "--noheader", f"--jobs={job.id}", "--format=%M").split(":")
    limit = [f"TimeLimit={int(elapsed[-2]) + SIGNAL // 60 + 1}", f"JobId={job.id}"]
    job.stopped_by("scontrol", "update", *limit, frozen=frozen, then=("scontrol", "update", f"JobId={job.id}", LONG))


def by_requeue(job: Job, frozen: list[int]) -> None:
    job.stopped_by("scontrol", "requeue", job.id, frozen=frozen)


def by_preemption(job: Job, frozen: list[int]) -> None:
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    job.stopped_by(*urgent, frozen=frozen)


def test_a_job_that_is_stopped_in_every_way_is_requeued_and_ends_as_if_undisturbed(
    cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    config = tiny(text, slurm={"signal": SIGNAL})
    job = submit(cluster, tmp_path, config)
    for stop in (by_time_limit, by_requeue, by_preemption):
        stop(job, job.frozen_at(max(training_lines(job.run), default=0) + 2))
        cluster.wait_for(job.id, "PENDING", log=job.log)
    cluster.wait_for(job.id, "COMPLETED", log=job.log)
    lines = training_lines(job.run)
    assert set(lines) == set(range(1, STEPS + 1))
    assert len({line["attempt"] for line in lines.values()}) == 4, job.said()
    logged = (job.run / "metrics.jsonl").read_text().count('"loss"')
    assert logged == STEPS, "a step was computed twice, or the run began again"
    undisturbed = weights(reference_run({**config, "hardware": {}, "slurm": {}}, world_size=2))
    found = weights(job.run)
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], undisturbed[name]) for name in found)
