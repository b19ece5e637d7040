"""Slurm: check a run against the cluster, submit its batch script, and follow the job."""

from pathlib import Path

from shoal.catalogue.gpus import recognize
from shoal.config.schema import Config
from shoal.launch.cluster.jobs import JobState
from shoal.launch.cluster.slurm_cluster import Nodes, partition_names, read_cluster
from shoal.launch.cluster.slurm_commands import run_slurm
from shoal.launch.cluster.slurm_script import render_script
from shoal.launch.cluster.submission import CPU, Submission
from shoal.mistakes import UserMistake, suggestion

FILE = "job.sbatch"
# Slurm's states of a job; those of one that has failed are its words for why.
STATES = {
    "PENDING": "pending",
    "CONFIGURING": "pending",
    "REQUEUED": "pending",
    "REQUEUE_HOLD": "pending",
    "SPECIAL_EXIT": "pending",
    "RESV_DEL_HOLD": "pending",
    "RUNNING": "running",
    "SUSPENDED": "running",
    "SIGNALING": "running",
    "STAGE_OUT": "running",
    "COMPLETING": "stopping",
    "COMPLETED": "finished",
    "CANCELLED": "cancelled",
}


def settle(config: Config, *, dry_run: bool) -> Config:
    """`config` with the devices per node and their kind, as the partition has them; a UserMistake if no node has what
    the run needs."""
    cluster = _cluster(dry_run=dry_run)
    hardware = config.hardware
    if cluster is None:
        if hardware.devices == "auto":
            raise UserMistake(
                "hardware.devices is auto, and no cluster can be asked from this machine; set the devices per "
                "node, as in hardware.devices=8."
            )
        return config
    nodes = _wanted_nodes(config, cluster)
    gpu = CPU if hardware.gpu == "auto" and not any(one.gpus for one in nodes) else hardware.gpu
    on_cpu = gpu == CPU or hardware.is_cpu
    most = 1 if on_cpu else max([1, *(one.gpus for one in nodes)])
    devices = most if hardware.devices == "auto" else hardware.devices
    if gpu == "auto":
        kinds = {one.gpu_type for one in nodes if one.gpus >= devices}
        kind = config.slurm.gpu_type or (kinds.pop() if len(kinds) == 1 else None)
        known = recognize(kind) if kind is not None else None
        gpu = "auto" if known is None else known.name
    _check_size(config, nodes, devices, gpus=not on_cpu)
    return config.model_copy(update={"hardware": hardware.model_copy(update={"devices": devices, "gpu": gpu})})


def render(submission: Submission) -> str:
    return render_script(submission)


def submit(submission: Submission, file: Path) -> str:
    """Submit the script and return the job's ID."""
    printed = run_slurm(["sbatch", "--parsable", str(file)], "The job cannot be submitted")
    return printed.strip().partition(";")[0]


def states(jobs: list[str]) -> dict[str, JobState]:
    """The states of jobs, as far as the controller or the accounting still knows them."""
    squeue = ["squeue", "--noheader", "--array", "--states=all", f"--jobs={','.join(jobs)}", "--format=%i|%T|%r|%N"]
    found = _read_states(squeue)
    forgotten = [job for job in jobs if job not in found]
    if forgotten:
        fields = "--format=JobID,State,Reason,NodeList"
        sacct = ["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={','.join(forgotten)}", fields]
        found |= _read_states(sacct)
    return found


def cancel(job: str) -> None:
    run_slurm(["scancel", job], f"Job {job} cannot be cancelled")


def _state(state: str, reason: str, nodes: str) -> JobState:
    word = state.split()[0].rstrip("+")  # CANCELLED by 1000
    known = STATES.get(word, "failed")
    waits = known == "pending" and reason not in ("", "None")
    detail = reason if waits else word.lower().replace("_", " ") if known == "failed" else ""
    return JobState(known, detail, nodes)


def _read_states(command: list[str]) -> dict[str, JobState]:
    """The lines ID|STATE|REASON|NODES of squeue or sacct. Both fail if they know none of the jobs, and there may be no
    Slurm here, or no accounting."""
    try:
        printed = run_slurm(command, "The jobs cannot be found")
    except UserMistake:
        return {}
    lines = [line.split("|") for line in printed.splitlines()]
    return {line[0]: _state(*line[1:4]) for line in lines if len(line) >= 4 and line[1].strip()}


def _cluster(*, dry_run: bool) -> list[Nodes] | None:
    """The cluster; None: it cannot be asked, and a dry run goes on without it."""
    try:
        return read_cluster()
    except UserMistake:
        if not dry_run:
            raise
        return None


def _wanted_nodes(config: Config, cluster: list[Nodes]) -> list[Nodes]:
    """The nodes that the job may get."""
    wanted = config.slurm.partition
    names = partition_names(cluster)
    listed = f"the partitions are {', '.join(names)}"
    if wanted is None:
        nodes = [one for one in cluster if one.default]
        if not nodes:
            raise UserMistake(f"The cluster has no default partition; set slurm.partition: {listed}.")
        return nodes
    nodes = [one for one in cluster if one.partition in wanted.split(",")]
    unknown = [name for name in wanted.split(",") if name not in names]
    if unknown:
        raise UserMistake(f"slurm.partition {unknown[0]} does not exist: {listed}.{suggestion(unknown[0], names)}")
    return nodes


def _check_size(config: Config, nodes: list[Nodes], devices: int, *, gpus: bool) -> None:
    where = f"partition {nodes[0].partition}" if len({one.partition for one in nodes}) == 1 else "these partitions"
    if gpus:
        most = max(one.gpus for one in nodes)
        if devices > most:
            raise UserMistake(
                f"hardware.devices is {devices}, but no node of {where} has more than {most} GPUs; ask for fewer, with "
                "more hardware.nodes."
            )
        nodes = [one for one in nodes if one.gpus >= devices]
    cpus = max(one.cpus for one in nodes)
    if devices * config.slurm.cpus_per_task > cpus:
        raise UserMistake(
            f"slurm.cpus_per_task {config.slurm.cpus_per_task} × {devices} devices per node is more than the {cpus} "
            f"CPUs of a node of {where}; set slurm.cpus_per_task to at most {cpus // devices}."
        )
    nodes = [one for one in nodes if one.cpus >= devices * config.slurm.cpus_per_task]
    count = sum(one.count for one in nodes)
    if config.hardware.nodes > count:
        raise UserMistake(
            f"hardware.nodes is {config.hardware.nodes}, but {where} has {count} such "
            f"{'node' if count == 1 else 'nodes'}."
        )
    limit = max(one.limit for one in nodes)
    if config.slurm.seconds > limit:
        raise UserMistake(
            f"slurm.time {config.slurm.time} is longer than {where} allows, which is {limit / 3600:g} hours; a run "
            "that reaches its time limit is requeued and resumes, so set a shorter one."
        )
