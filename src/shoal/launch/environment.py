"""The rank of this process as its launcher's environment variables give it: torchrun, srun, MPI, or RANK set by hand.

Functions of the variables, without torch, so that contradictions are found before anything starts.
"""

import os
import re
import zlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from shoal.mistakes import UserMistake

# Set by our launchers: a folder that the ranks of one launch share.
LAUNCH_FOLDER = "SHOAL_LAUNCH"
# Set once the variables below are: who has started this process.
STARTED_BY = "SHOAL_STARTED_BY"
# torchrun's names, which everything else here reads.
RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
MASTER_ADDR, MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
TORCHRUN, SRUN, BY_HAND = "torchrun", "srun", "the environment"
# Rank, size, local rank and local size of each MPI, the most specific names first: some set those of others too.
MPI = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
# What names one launch: ranks of different launches must not meet.
LAUNCH_NAMES = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_ess_jobid", "PBS_JOBID", "LSB_JOBID")
MPICH_DAEMON = "hydra_pmi_proxy"  # also of Intel MPI
# Where ranks meet unless MASTER_PORT says so.
FIRST_PORT, PORTS = 15_000, 15_000
LOOPBACK = ("localhost", "127.", "::1")


@dataclass(frozen=True)
class Placement:
    """One process of several, and where they meet."""

    started_by: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launch: str  # a name that only the processes of this launch have
    master_addr: str
    master_port: int

    @property
    def one_per_node(self) -> bool:
        """Whether every process is alone on its node."""
        return self.world_size > 1 and self.local_world_size == 1

    @property
    def several_nodes(self) -> bool:
        return self.local_world_size < self.world_size


def adopt(environment: MutableMapping[str, str]) -> Placement | None:
    """The placement of this process, whose variables get torchrun's names; None if it was started alone."""
    found = read_placement(environment)
    if found is None or environment.get(LAUNCH_FOLDER):
        return found
    environment.update(
        {
            RANK: str(found.rank),
            WORLD_SIZE: str(found.world_size),
            LOCAL_RANK: str(found.local_rank),
            MASTER_ADDR: found.master_addr,
            MASTER_PORT: str(found.master_port),
            STARTED_BY: found.started_by,
        }
    )
    if found.started_by != BY_HAND:  # where it may be unknown
        environment[LOCAL_WORLD_SIZE] = str(found.local_world_size)
    return found


def read_placement(environment: Mapping[str, str]) -> Placement | None:
    """The placement of this process; None if it was started alone. A UserMistake if its variables contradict."""
    started_by = environment.get(STARTED_BY) or _started_by(environment)
    if started_by is None:
        return None
    if environment.get(LAUNCH_FOLDER) or STARTED_BY in environment or started_by in (TORCHRUN, BY_HAND):
        names = (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE)
    elif started_by == SRUN:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "")
    else:
        names = MPI[started_by]
    rank, world_size = _number(environment, names[0]), _number(environment, names[1])
    if world_size < 1 or not 0 <= rank < world_size:
        raise UserMistake(
            f"{names[0]} is {rank} and {names[1]} is {world_size}, but ranks count from 0 to {names[1]} - 1."
        )
    if started_by == SRUN and not names[3]:
        local_world_size = _tasks_on_this_node(environment, world_size)
    else:
        local_world_size = _number(environment, names[3], default=world_size)
    local_rank = _number(environment, names[2], default=rank % local_world_size)
    if not 0 <= local_rank < local_world_size or local_world_size > world_size:
        raise UserMistake(
            f"Rank {rank} of {world_size} has local rank {local_rank} of {local_world_size} processes on its node "
            f"({names[2]} and {names[3] or 'SLURM_STEP_TASKS_PER_NODE'}), which cannot be; start them anew."
        )
    if not environment.get(LAUNCH_FOLDER):
        _check_agreement(environment, started_by, rank, world_size)
    launch = _launch(environment, started_by)
    return Placement(
        started_by,
        rank,
        world_size,
        local_rank,
        local_world_size,
        launch,
        _master(environment, started_by, world_size, local_world_size),
        _number(environment, MASTER_PORT, default=default_port(launch)),
    )


def default_port(launch: str) -> int:
    """Steps of one job, and jobs of one node, should not meet at the same port."""
    return FIRST_PORT + zlib.crc32(launch.encode()) % PORTS


def first_node(nodes: str) -> str:
    """The first name in Slurm's compressed list of nodes: `gpu[03-05,07]` begins with gpu03."""
    prefix, _, rest = nodes.partition("[")
    if "," in prefix or not rest:
        return nodes.partition(",")[0]
    inside, _, suffix = rest.partition("]")
    return prefix + re.split("[-,]", inside)[0] + suffix.partition(",")[0]


def is_loopback(address: str) -> bool:
    return address.startswith(LOOPBACK)


def _started_by(environment: Mapping[str, str]) -> str | None:
    """Who has started this process as one of several, the innermost launcher first: mpirun under Slurm has srun start
    one daemon per node, whose variables the ranks inherit, and so has torchrun."""
    if RANK in environment:
        if WORLD_SIZE not in environment:
            raise UserMistake(
                f"RANK is {environment[RANK]!r}, but WORLD_SIZE is not set; set both, or neither to start shoal alone."
            )
        return TORCHRUN if "TORCHELASTIC_RUN_ID" in environment else BY_HAND
    for name, (rank, size, _, _) in MPI.items():
        if rank in environment and _number(environment, size, default=1) > 1:
            return name
    if _number(environment, "SLURM_STEP_NUM_TASKS", default=1) > 1:  # only srun sets it, and not the batch script
        return SRUN
    if _number(environment, WORLD_SIZE, default=1) > 1:
        raise UserMistake(
            f"WORLD_SIZE is {environment[WORLD_SIZE]}, but nothing gives this process its rank: neither RANK, nor "
            "variables of srun or MPI; unset WORLD_SIZE to start shoal alone, or set RANK in each process."
        )
    return None


def _check_agreement(environment: Mapping[str, str], started_by: str, rank: int, world_size: int) -> None:
    """A UserMistake if variables of another launcher say something else of this process."""
    if started_by == TORCHRUN:  # it may run within tasks of srun
        return
    tasks = _number(environment, "SLURM_STEP_NUM_TASKS", default=1)
    if started_by == BY_HAND and tasks > 1:
        if world_size % tasks:
            raise UserMistake(
                f"WORLD_SIZE is {world_size}, but srun started {tasks} tasks (SLURM_STEP_NUM_TASKS); unset RANK and "
                "WORLD_SIZE, and shoal takes Slurm's."
            )
        task = _number(environment, "SLURM_PROCID", default=0)
        if world_size == tasks and rank != task:
            raise UserMistake(
                f"RANK is {rank}, but this is task {task} of srun (SLURM_PROCID); unset RANK and WORLD_SIZE, and shoal "
                "takes Slurm's."
            )
    elif started_by != BY_HAND and _number(environment, WORLD_SIZE, default=world_size) != world_size:
        raise UserMistake(
            f"WORLD_SIZE is {environment[WORLD_SIZE]}, but {started_by} started {world_size} processes; unset it, or "
            "start as many."
        )


def _tasks_on_this_node(environment: Mapping[str, str], tasks: int) -> int:
    """From Slurm's list of tasks per node: `2(x3),1` is 2, 2, 2, 1."""
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", default=1)
    counts: list[int] = []
    for part in environment.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        counts += [int(found[1])] * int(found[2] or 1) if found else []
    node = _number(environment, "SLURM_NODEID", default=0)
    return counts[node] if node < len(counts) else -(-tasks // nodes)


def _launch(environment: Mapping[str, str], started_by: str) -> str:
    if started_by == TORCHRUN:
        return f"torchrun {environment.get('TORCHELASTIC_RUN_ID', '')}"
    if started_by == SRUN:
        names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        return "srun " + ".".join(environment.get(name, "0") for name in names)
    known = [environment[name] for name in LAUNCH_NAMES if name in environment]
    step = [environment[name] for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in environment]
    meeting = [f"{environment.get(MASTER_ADDR, '')}:{environment.get(MASTER_PORT, '')}"]
    if started_by in MPI and not known and not step and MASTER_ADDR not in environment:
        meeting += _mpi_daemon()
    return f"{started_by} {'.'.join(known or step or meeting)}"


def _mpi_daemon() -> list[str]:
    """The process of MPICH that has started the ranks of this node, of which their variables say nothing: two launches
    on one node must not meet."""
    process = os.getppid()
    while process > 1:
        try:
            name = Path(f"/proc/{process}/comm").read_text().strip()
            if name == MPICH_DAEMON:
                return [str(process)]
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):  # not Linux, or it has ended
            break
    return []


def _master(environment: Mapping[str, str], started_by: str, world_size: int, local_world_size: int) -> str:
    """The address of rank 0."""
    several = local_world_size < world_size
    if given := environment.get(MASTER_ADDR):
        # On rank 0 itself, schedulers of containers may call it localhost.
        if several and is_loopback(given) and STARTED_BY not in environment and _number(environment, RANK, 1) != 0:
            raise UserMistake(
                f"MASTER_ADDR is {given}, which is this node, but rank 0 of {world_size} is on another: there are "
                f"{local_world_size} processes here; set MASTER_ADDR to the name of rank 0's node."
            )
        return given
    if not several:
        return "127.0.0.1"
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"):
        if name in environment:
            return first_node(environment[name])
    if file := environment.get("PBS_NODEFILE"):
        try:
            return Path(file).read_text().split()[0]
        except (OSError, IndexError):
            pass
    raise UserMistake(
        f"{started_by} started {world_size} processes, {local_world_size} on this node, but MASTER_ADDR is not set; "
        "set it to the name of rank 0's node."
    )


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    given = environment.get(name)
    if given is None or given == "":
        if default is not None:
            return default
        raise UserMistake(f"{name} is not set, but other variables of its launcher are; start the processes anew.")
    try:
        return int(given)
    except ValueError:
        raise UserMistake(f"{name} is {given!r}, which is not a whole number.") from None
