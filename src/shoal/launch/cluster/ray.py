"""Ray: a program that trains with Ray Train's TorchTrainer, one worker per device."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.config.schema import Config
from shoal.launch.cluster.elsewhere import ask, dns_name, settle_without_cluster
from shoal.launch.cluster.jobs import JobState
from shoal.launch.cluster.submission import Submission
from shoal.mistakes import UserMistake

FILE = "train_ray.py"
MOST_RESTARTS = 100
STATES = {
    "PENDING": "pending",
    "RUNNING": "running",
    "SUCCEEDED": "finished",
    "STOPPED": "cancelled",
    "FAILED": "failed",
}


def settle(config: Config, *, dry_run: bool) -> Config:
    config = settle_without_cluster(config, "ray")
    for key in ("setup", "container", "container_mounts"):
        if getattr(config.slurm, key):
            raise UserMistake(f"slurm.{key} means nothing to ray, whose workers are started already; remove it.")
    return config


def render(submission: Submission) -> str:
    """The program. `python FILE` runs it on this machine or, with RAY_ADDRESS, on a cluster."""
    resources: dict[str, Any] = {"CPU": submission.slurm.cpus_per_task}
    if submission.gpus:
        resources["GPU"] = 1
    restarts = MOST_RESTARTS if submission.slurm.requeue else 0
    return f'''\
"""The run {submission.name}: python {FILE}"""

import os

# Before Ray is imported: it reports its use to its makers, unless this says no.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from shoal.launch.cluster.ray_worker import train

trainer = TorchTrainer(
    train,
    train_loop_config={{
        "command": {_shown(list(submission.command))},
        "folder": {_shown(str(submission.folder))},
        "environment": {_shown(dict(submission.environment))},
    }},
    scaling_config=ScalingConfig(
        num_workers={submission.world_size},
        use_gpu={submission.gpus},
        resources_per_worker={_shown(resources)},
    ),
    run_config=RunConfig(
        name={_shown(submission.name)},
        storage_path={_shown(str(submission.run / "ray"))},
        # All workers are started again when one fails, and the run resumes.
        failure_config=FailureConfig(max_failures={restarts}),
    ),
)
trainer.fit()
'''


def submit(submission: Submission, file: Path) -> str:
    """Submit the program to the cluster that RAY_ADDRESS names, or that runs on this machine."""
    job = f"{dns_name(submission.name, 40)}-{int(time.time())}"
    command = ["ray", "job", "submit", "--no-wait", f"--submission-id={job}", "--", submission.command[0], str(file)]
    ask(command, "The job cannot be submitted")
    return job


def states(jobs: list[str]) -> dict[str, JobState]:
    found: dict[str, JobState] = {}
    for job in jobs:
        with suppress(UserMistake):  # a cluster that is gone does not know it
            printed = ask(["ray", "job", "status", job], "The job cannot be found").upper()
            for word, state in STATES.items():
                if word in printed:
                    found[job] = JobState(state)
    return found


def cancel(job: str) -> None:
    ask(["ray", "job", "stop", job], f"Job {job} cannot be cancelled")


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
