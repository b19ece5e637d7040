"""Kubernetes: a JobSet with one pod per node, in which torchrun starts one process per device.

The pods share the file system of a PersistentVolumeClaim: `slurm.container_mounts: [CLAIM:/folder]`. A pod that is
preempted gets SIGTERM, the run saves and stops, and the JobSet starts all pods again, which resume.
"""

import json
import math
import re
from contextlib import suppress
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

FILE = "jobset.yaml"
# The name of a pod is JOBSET-node-0-INDEX-xxxxx, of at most 63 characters.
LONGEST_NAME = 40
MOST_RESTARTS = 100
RUNNING_NODE = "node"
STATES = {"Completed": "finished", "Failed": "failed", "Suspended": "pending"}


def settle(config: Config, *, dry_run: bool) -> Config:
    config = settle_without_cluster(config, "kubernetes")
    if config.slurm.container is None:
        raise UserMistake("A pod needs an image with shoal in it; set slurm.container.")
    return config


def render(submission: Submission) -> str:
    for what, folder in (("working", submission.folder), ("run", submission.run)):
        if not mounted(submission, folder):
            raise UserMistake(
                f"The {what} folder {folder} is on no volume of the pods; add slurm.container_mounts CLAIM:TARGET, the "
                "name of a PersistentVolumeClaim and a folder that contains it."
            )
    name = dns_name(submission.name, LONGEST_NAME)
    comment = f"The run {submission.name}: kubectl create -f {FILE}. It needs the JobSet controller."
    return write_manifest(
        comment,
        {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": "shoal"}},
            "spec": {
                "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
                # All pods are started again when one fails or has stopped early, and resume.
                "failurePolicy": {"maxRestarts": MOST_RESTARTS if submission.slurm.requeue else 0},
                "replicatedJobs": [{"name": RUNNING_NODE, "replicas": 1, "template": {"spec": _job(submission, name)}}],
            },
        },
    )


def submit(submission: Submission, file: Path) -> str:
    printed = ask(["kubectl", "create", "--output=name", f"--filename={file}"], "The job cannot be submitted")
    return printed.strip().rpartition("/")[2]


def states(jobs: list[str]) -> dict[str, JobState]:
    found = {}
    for job in jobs:
        with suppress(UserMistake):  # another machine may have kubectl
            printed = ask(
                ["kubectl", "get", "jobset", job, "--ignore-not-found", "--output=json"], "The job cannot be found"
            )
            if printed.strip():
                found[job] = _state(json.loads(printed))
    return found


def cancel(job: str) -> None:
    ask(["kubectl", "delete", "jobset", job, "--ignore-not-found"], f"Job {job} cannot be cancelled")


def _job(submission: Submission, name: str) -> dict[str, Any]:
    slurm = submission.slurm
    job: dict[str, Any] = {
        "parallelism": submission.nodes,
        "completions": submission.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
    }
    if math.isfinite(slurm.seconds):
        job["activeDeadlineSeconds"] = int(slurm.seconds)
    pod = {
        "restartPolicy": "Never",
        # To finish the step and save.
        "terminationGracePeriodSeconds": slurm.signal,
        "containers": [_container(submission, name)],
        "volumes": [
            # NCCL needs more than the 64 MiB that a container has.
            {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
            *(_volume(index, source) for index, (source, _) in enumerate(mounts(submission))),
        ],
    }
    return {**job, "template": {"spec": pod}}


def _container(submission: Submission, name: str) -> dict[str, Any]:
    slurm = submission.slurm
    limits: dict[str, Any] = {"cpu": slurm.cpus_per_task * submission.devices}
    if slurm.mem is not None and slurm.mem.strip("0"):
        # Slurm's units are binary, and megabytes if there is none.
        limits["memory"] = re.sub(r"([KMGT]?)$", lambda unit: f"{unit[1] or 'M'}i", slurm.mem.upper(), count=1)
    if submission.gpus:
        limits["nvidia.com/gpu"] = submission.devices
    script = node_script(submission, rank="$JOB_COMPLETION_INDEX", address=f"{name}-{RUNNING_NODE}-0-0.{name}")
    return {
        "name": "train",
        "image": slurm.container,
        "command": ["/bin/sh", "-c", script],
        "workingDir": str(submission.folder),
        "env": [{"name": key, "value": value} for key, value in submission.environment.items()],
        "resources": {"limits": limits},
        "volumeMounts": [
            {"name": "shared-memory", "mountPath": "/dev/shm"},
            *({"name": f"volume-{index}", "mountPath": target} for index, (_, target) in enumerate(mounts(submission))),
        ],
    }


def _volume(index: int, source: str) -> dict[str, Any]:
    name = f"volume-{index}"
    if source.startswith("/"):  # of every node, such as a parallel file system that is mounted there
        return {"name": name, "hostPath": {"path": source}}
    return {"name": name, "persistentVolumeClaim": {"claimName": source}}


def _state(jobset: dict[str, Any]) -> JobState:
    status = jobset.get("status", {})
    for condition in status.get("conditions", []):
        if condition.get("status") == "True" and condition.get("type") in STATES:
            return JobState(STATES[condition["type"]], str(condition.get("message", "")))
    active = any(one.get("active", 0) for one in status.get("replicatedJobsStatus", []))
    return JobState("running" if active else "pending")
