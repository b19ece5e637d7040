"""Initialize this process as a rank: alone, or one of several started by our launcher, torchrun, srun or MPI."""

import os
import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, HashStore, Store

from shoal.config.schema import Config
from shoal.launch.environment import LAUNCH_FOLDER, TORCHRUN, Placement, adopt
from shoal.launch.interfaces import GLOO, NCCL, check_interfaces, own_address
from shoal.launch.rendezvous import Meeting, Member, check_devices, has_agent_store
from shoal.mistakes import UserMistake
from shoal.parallel.ranks import Ranks
from shoal.resilience.collectives import record_collectives

# Set by our launcher of several nodes, whose ranks meet over the network.
SEVERAL_NODES = "SHOAL_NODES"
# If the user has set one of these, the allocator is not configured.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# To try out parallelism on CPU; more processes would only wait for each other.
PROCESSES_PER_CORE = 4


def started_by_others() -> bool:
    """Whether this process was started as one rank of several."""
    return adopt(os.environ) is not None


def is_first() -> bool:
    """Whether this process prints: a single process, the launcher, or rank 0."""
    place = adopt(os.environ)
    return place is None or place.rank == 0


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
    """The heartbeat file that the ranks of one launch on one node share."""
    folder = os.environ.get(LAUNCH_FOLDER)
    return None if folder is None or SEVERAL_NODES in os.environ else Path(folder) / f"heartbeats-{attempt()}"


def local_rank() -> int:
    """The index of this process on its node."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def open_meeting() -> Meeting | None:
    """Connect to the other ranks of this launch, without waiting for any but rank 0. None where there is no other and
    none can come, and for ranks of one node that our launcher has started, which meet in a file."""
    if (os.environ.get(LAUNCH_FOLDER) and SEVERAL_NODES not in os.environ) or "RANK" not in os.environ:
        return None
    place = adopt(os.environ)
    # Under an elastic agent more nodes may join a single rank, which then has to know that it has begun the run.
    alone = place is not None and place.world_size == 1 and not has_agent_store()
    return None if place is None or alone else Meeting(place, attempt())


def joined(config: Config, meeting: Meeting | None = None) -> AbstractContextManager[Ranks]:
    """Join the ranks of a run."""
    # CPU offload is FSDP's, which needs a process group even for one rank.
    return joined_within(config.train.hang_timeout, alone=config.parallel.offload != "cpu", meeting=meeting)


@contextmanager
def joined_within(hang_timeout: float, *, alone: bool = True, meeting: Meeting | None = None) -> Iterator[Ranks]:
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
    check_interfaces([GLOO, NCCL] if device.type == "cuda" else [GLOO])
    record_collectives()
    # Longer than the watchdog's timeout, whose message is more helpful.
    timeout = timedelta(seconds=2 * hang_timeout + 60)
    # Collectives on host tensors use gloo also where those on device tensors use NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_rendezvous_store(rank, world_size, device, timeout, meeting),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _rendezvous_store(
    rank: int, world_size: int, device: torch.device, timeout: timedelta, meeting: Meeting | None
) -> Store:
    """The rendezvous store. Each attempt has its own, without the addresses of dead ranks."""
    if world_size == 1:
        return HashStore()
    if (meeting := meeting or open_meeting()) is None:
        # On one node a file store needs no port, which others could reach or occupy.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return FileStore(str(Path(os.environ[LAUNCH_FOLDER]) / f"store-{attempt()}"), world_size)
    address = ""
    with suppress(OSError):
        address = own_address(meeting.place.master_addr) or ""
    member = Member(rank, socket.gethostname(), _identity(device), address)
    store = meeting.gather(member, timeout.total_seconds())
    check_devices(meeting.members)
    store.set_timeout(timeout)
    return store


def _identity(device: torch.device) -> str:
    """What no other device of this node has."""
    if device.type != "cuda":
        return ""
    found = torch.cuda.get_device_properties(device)
    return str(getattr(found, "uuid", "")) or f"on PCI bus {getattr(found, 'pci_bus_id', device.index)}"


def first_device() -> torch.device:
    """A device to inspect. It is not initialized: a CUDA context of the launcher would cost rank 0 half a GB."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def choose_device(index: int) -> torch.device:
    """The device for local rank `index`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    present = torch.cuda.device_count()
    if index >= present > 1:
        raise UserMistake(
            f"This is process {index + 1} on this node, which has {present} CUDA devices; start one process per device."
        )
    # A process that sees one device uses it, whatever its local rank: ranks find out later whether each has its own.
    device = torch.device("cuda", index if present > 1 else 0)
    torch.cuda.set_device(device)
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # Sharded training allocates tensors of many sizes, which fragment fixed segments.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return device


def processes_wanted(config: Config) -> int:
    """The number of processes to start, all of them on this node."""
    if config.hardware.nodes > 1:
        raise UserMistake(
            f"hardware.nodes is {config.hardware.nodes}, but this process was started alone; start shoal on every node "
            "with torchrun: torchrun --nnodes N --nproc-per-node DEVICES --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
            "-m shoal train FILE"
        )
    return processes_here(config)


def processes_here(config: Config) -> int:
    """The number of processes for this node's devices."""
    wanted = config.hardware.devices
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


def check_placement(config: Config, place: Placement) -> None:
    """A UserMistake if the config names other devices than those that processes were started for."""
    hardware = config.hardware
    if isinstance(hardware.devices, int) and "LOCAL_WORLD_SIZE" in os.environ:
        if hardware.devices != place.local_world_size:
            raise UserMistake(
                f"hardware.devices is {hardware.devices}, but {place.started_by} started {place.local_world_size} "
                f"{'process' if place.local_world_size == 1 else 'processes'} on this node; start one per device, or "
                "leave hardware.devices out."
            )
        # torchrun may go on with fewer nodes.
        if hardware.nodes > 1 and place.started_by != TORCHRUN:
            check_nodes(hardware.nodes, -(-place.world_size // place.local_world_size), place)


def check_nodes(wanted: int, started: int, place: Placement) -> None:
    if wanted not in (1, started):
        raise UserMistake(
            f"hardware.nodes is {wanted}, but {place.started_by} started processes on {started} "
            f"{'node' if started == 1 else 'nodes'}; start them on as many, or leave hardware.nodes out."
        )
