"""SkyPilot: a task file. Each node of a cloud cluster runs torchrun, which starts one process per device.

The working folder is copied to the nodes. The folder of the runs has to outlive them, so it should be in a bucket:
`slurm.container_mounts: [s3://BUCKET/runs:/runs]` and `run_dir: /runs`.
"""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.config.schema import Config
from shoal.launch.cluster.elsewhere import (
    ask,
    dns_name,
    mounted,
    mounts,
    node_script,
    settle_without_cluster,
    write_manifest,
)
from shoal.launch.cluster.jobs import JobState
from shoal.launch.cluster.submission import Submission
from shoal.mistakes import UserMistake

FILE = "skypilot.yaml"
# SkyPilot's names of GPUs, where they are not ours in upper case.
ACCELERATORS = {
    "v100-16gb": "V100",
    "v100-32gb": "V100-32GB",
    "a100-40gb": "A100",
    "h100-80gb": "H100",
    "h100-96gb": "H100",
    "h100-pcie": "H100",
    "a6000": "RTXA6000",
}
# Where SkyPilot copies the working folder to, and runs the commands.
WORKING_FOLDER = "~/sky_workdir"


def settle(config: Config, *, dry_run: bool) -> Config:
    config = settle_without_cluster(config, "skypilot")
    if config.hardware.gpu == "auto" and config.slurm.gpu_type is None:
        raise UserMistake("hardware.gpu is auto, but a cloud has many kinds; set hardware.gpu, or cpu.")
    return config


def render(submission: Submission) -> str:
    there = _on_the_nodes(submission)
    resources: dict[str, Any] = {"cpus": f"{submission.slurm.cpus_per_task * submission.devices}+"}
    if submission.gpus:
        kind = submission.slurm.gpu_type or ACCELERATORS.get(submission.gpu or "", (submission.gpu or "").upper())
        resources = {"accelerators": f"{kind}:{submission.devices}", **resources}
    if submission.slurm.container is not None:
        resources["image_id"] = f"docker:{submission.slurm.container.removeprefix('docker://')}"
    files: dict[str, Any] = {
        target: {"source": source, "mode": "MOUNT"} if "://" in source else source
        for source, target in mounts(submission)
    }
    files[there(submission.config, "~")] = str(submission.config)
    if submission.slurm.python is None:  # that of the nodes, not of this machine
        submission = replace(submission, command=("python", *submission.command[1:]))
    script = node_script(submission, rank="$SKYPILOT_NODE_RANK", address='"$(echo "$SKYPILOT_NODE_IPS" | head -n 1)"')
    for path in (submission.config, submission.run):
        script = script.replace(str(path), there(path, ""))
    return write_manifest(
        f"The run {submission.name}: sky jobs launch {FILE}",
        {
            "name": dns_name(submission.name, 50),
            "num_nodes": submission.nodes,
            "resources": resources,
            "workdir": str(submission.folder),
            "file_mounts": files,
            "envs": {
                name: value.replace(str(submission.run), there(submission.run, ""))
                for name, value in submission.environment.items()
            },
            "run": script,
        },
    )


def submit(submission: Submission, file: Path) -> str:
    """As a managed job, which SkyPilot starts again on other nodes when a cloud takes them away."""
    printed = ask(["sky", "jobs", "launch", "--yes", "--detach-run", str(file)], "The job cannot be submitted")
    found = re.search(r"[Jj]ob ID: *(\d+)", printed)
    if found is None:
        raise UserMistake(f"sky jobs launch did not print the ID of a job; look for it with sky jobs queue. ({file})")
    return found[1]


def states(jobs: list[str]) -> dict[str, JobState]:
    """SkyPilot's states are its own: `sky jobs queue` prints them."""
    return {}


def cancel(job: str) -> None:
    ask(["sky", "jobs", "cancel", "--yes", job], f"Job {job} cannot be cancelled")


def _on_the_nodes(submission: Submission) -> Any:
    """A function from a path here to the path on the nodes: as it is on a mounted folder, else in the copy of the
    working folder."""
    if mounted(submission, submission.run):
        return lambda path, home: str(path)
    if not submission.run.is_relative_to(submission.folder):
        raise UserMistake(
            f"The run folder {submission.run} is neither inside of the working folder nor mounted; add "
            "slurm.container_mounts s3://BUCKET/runs:/runs and set run_dir to /runs."
        )
    return lambda path, home: os.path.join(WORKING_FOLDER if home else "", os.path.relpath(path, submission.folder))
