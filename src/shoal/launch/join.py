"""Initialize this process as a rank: alone, or one of several started by our launcher, torchrun or srun."""

import os
import re
from collections.abc import Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.parallel.ranks import Ranks
from shoal.resilience.collectives import record_collectives

# Set by our launcher: a folder on this node, shared by the ranks of one launch.
LAUNCH_FOLDER = "SHOAL_LAUNCH"
# If the user has set one of these, the allocator is not configured.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# To try out parallelism on CPU; more processes would only wait for each other.
PROCESSES_PER_CORE = 4
# Where tasks of srun meet.
FIRST_PORT, PORTS = 15_000, 15_000


def started_by_others() -> bool:
    """Whether this process was started as one rank of several."""
    adopt_srun(os.environ)
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process prints: a single process, the launcher, or rank 0."""
    adopt_srun(os.environ)
    return int(os.environ.get("RANK", "0")) == 0


def adopt_srun(environment: MutableMapping[str, str]) -> None:
    """Give a task of srun the variables that torchrun gives its processes. In a step of one task, and under torchrun
    inside srun, nothing changes."""
    tasks = int(environment.get("SLURM_STEP_NUM_TASKS", "1"))  # only srun sets it, and not the batch script
    if tasks == 1 or "RANK" in environment:
        return
    nodes = int(environment.get("SLURM_STEP_NUM_NODES", "1"))
    # Steps of one job, and jobs of one node, must not meet at the same port.
    step = 97 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"])
    environment.update(
        RANK=environment["SLURM_PROCID"],
        WORLD_SIZE=str(tasks),
        LOCAL_RANK=environment["SLURM_LOCALID"],
        LOCAL_WORLD_SIZE=str(-(-tasks // nodes)),
    )
    environment.setdefault("MASTER_ADDR", first_node(environment["SLURM_STEP_NODELIST"]))
    environment.setdefault("MASTER_PORT", str(FIRST_PORT + step % PORTS))


def first_node(nodes: str) -> str:
    """The first name in Slurm's compressed list of nodes: `gpu[03-05,07]` begins with gpu03."""
    prefix, _, rest = nodes.partition("[")
    if "," in prefix or not rest:
        return nodes.partition(",")[0]
    inside, _, suffix = rest.partition("]")
    return prefix + re.split("[-,]", inside)[0] + suffix.partition(",")[0]


def attempt() -> int:
    """How often an elastic agent has restarted this rank."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarted() -> bool:
    """Whether an elastic agent has restarted this rank after a failure: then the run is resumed."""
    return attempt() > 0


def may_be_restarted() -> bool:
    """Whether an elastic agent would restart this rank after a failure."""
    return attempt() < int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))


def heartbeat_file() -> Path | None:
    """The heartbeat file that the ranks of one launch on this node share."""
    folder = os.environ.get(LAUNCH_FOLDER)
    return None if folder is None else Path(folder) / f"heartbeats-{attempt()}"


def local_rank() -> int:
    """The index of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def joined(config: Config) -> AbstractContextManager[Ranks]:
    """Join the ranks of a run."""
    # CPU offload is FSDP's, which needs a process group even for one rank.
    return joined_within(config.train.hang_timeout, alone=config.parallel.offload != "cpu")


@contextmanager
def joined_within(hang_timeout: float, *, alone: bool = True) -> Iterator[Ranks]:
    """Join the ranks, with a process group if there are several, which is destroyed at the end.

    Collectives time out some time after `hang_timeout` seconds. With `alone` false a single process has a process group
    too.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(local_rank())
    ranks = Ranks(rank, world_size, local_rank(), device)
    if world_size == 1 and alone:
        yield ranks
        return
    record_collectives()
    # Longer than the watchdog's timeout, whose message is more helpful.
    timeout = timedelta(seconds=2 * hang_timeout + 60)
    # Collectives on host tensors use gloo also where those on device tensors use NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_rendezvous_store(world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _rendezvous_store(world_size: int, timeout: timedelta) -> Store:
    """The rendezvous store. Each attempt has its own, without the addresses of dead ranks."""
    if world_size == 1:
        return HashStore()
    if folder := os.environ.get(LAUNCH_FOLDER):
        # On one node a file store needs no port, which others could reach or occupy.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return FileStore(str(Path(folder) / f"store-{attempt()}"), world_size)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(f"attempt-{attempt()}", store)


def first_device() -> torch.device:
    """A device to inspect. It is not initialized: a CUDA context of the launcher would cost rank 0 half a GB."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def choose_device(index: int) -> torch.device:
    """The device for local rank `index`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if index >= torch.cuda.device_count():
        raise UserMistake(
            f"This is process {index + 1} on this node, which has {torch.cuda.device_count()} CUDA devices; "
            "start one process per device."
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # Sharded training allocates tensors of many sizes, which fragment fixed segments.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return device


def processes_wanted(config: Config) -> int:
    """The number of processes to start on this node."""
    wanted = config.hardware.devices
    if config.hardware.nodes > 1:
        raise UserMistake(
            f"hardware.nodes is {config.hardware.nodes}, but this process was started alone; start shoal on every node "
            "with torchrun: torchrun --nnodes N --nproc-per-node DEVICES --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
            "-m shoal train FILE"
        )
    return max(1, cuda_devices()) if wanted == "auto" else check_processes(wanted, "hardware.devices")


def cuda_devices() -> int:
    """The number of CUDA devices of this node."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_processes(wanted: int, asked: str) -> int:
    """`wanted`, if this node can run so many processes; `asked` is the setting's name for the message."""
    present = cuda_devices()
    if present and wanted > present:
        raise UserMistake(f"{asked} is {wanted}, but this machine has {present} CUDA device{'s' * (present > 1)}.")
    cores = os.cpu_count() or 1
    if not present and wanted > max(8, PROCESSES_PER_CORE * cores):
        raise UserMistake(
            f"{asked} is {wanted}, but this machine has no CUDA device and {cores} cores, which "
            f"{wanted} processes would have to share; ask for at most {max(8, PROCESSES_PER_CORE * cores)}."
        )
    return wanted
