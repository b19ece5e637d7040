"""A job that Slurm stops saves a checkpoint, is requeued, and resumes at that step."""

from pathlib import Path

import pytest
import torch

from tests.harness import reference_run, weights
from tests.launch.command import training_lines
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import STEPS, Job, submit, tiny

pytestmark = pytest.mark.slow


def by_signal(job: Job, frozen: list[int]) -> None:
    # What --signal does before the time limit, which Slurm looks at twice a minute.
    job.stopped_by("scancel", "--signal=USR1", job.id, frozen=frozen)


def by_requeue(job: Job, frozen: list[int]) -> None:
    job.stopped_by("scontrol", "requeue", job.id, frozen=frozen)


def by_preemption(job: Job, frozen: list[int]) -> None:
    urgent = ["sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"]
    job.stopped_by(*urgent, frozen=frozen)


@pytest.mark.parametrize("stopped", [by_signal, by_requeue, by_preemption])
def test_a_job_that_is_stopped_is_requeued_and_ends_as_if_undisturbed(
    stopped, cluster: Cluster, text: Path, tmp_path: Path
) -> None:
    config = tiny(text)
    job = submit(cluster, tmp_path, config)
    stopped(job, job.frozen_at(3))
    cluster.wait_for(job.id, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", log=job.log)
    assert cluster.state(job.id) == "COMPLETED", job.said()
    lines = training_lines(job.run)
    assert set(lines) == set(range(1, STEPS + 1))
    resumed = min(step for step, line in lines.items() if line["attempt"] > 0)
    assert resumed > 3
    logged = (job.run / "metrics.jsonl").read_text().count('"loss"')
    assert logged == STEPS, "a step was computed twice, or the run began again"
    undisturbed = weights(reference_run({**config, "hardware": {}, "slurm": {}}, world_size=2))
    found = weights(job.run)
    assert found.keys() == undisturbed.keys()
    assert all(torch.equal(found[name], undisturbed[name]) for name in found)
