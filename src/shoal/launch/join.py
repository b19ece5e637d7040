"""Become a rank: alone, or one of several processes that something else has started (our launcher, torchrun)."""

import os
from collections.abc import Iterator
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

# Set by our own launcher: a folder on this machine, shared by the ranks of one launch.
LAUNCH_FOLDER = "SHOAL_LAUNCH"
# The user's own, if there are any.
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# To try out a split on a CPU; more than this would only wait for each other.
PROCESSES_PER_CORE = 4


def started_by_others() -> bool:
    """Whether this process was started as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Whether this process is the one that speaks: alone, the launcher, or rank 0."""
    return int(os.environ.get("RANK", "0")) == 0


def attempt() -> int:
    """How often an elastic agent has started this process's rank before."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def restarted() -> bool:
    """Whether an elastic agent has started this process anew after a failure: then the run goes on where it was."""
    return attempt() > 0


def heartbeat_file() -> Path | None:
    """Where the ranks of one launch on this machine can see each other live."""
    folder = os.environ.get(LAUNCH_FOLDER)
    return None if folder is None else Path(folder) / f"beats-{attempt()}"


def local_rank() -> int:
    """Which of this machine's processes this is."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def joined(config: Config) -> AbstractContextManager[Ranks]:
    """This process as a rank of a run."""
    # Offloading is FSDP's, which wants a group, be it of one.
    return joined_within(config.train.hang_timeout, alone=config.parallel.offload != "cpu")


@contextmanager
def joined_within(hang_timeout: float, *, alone: bool = True) -> Iterator[Ranks]:
    """This process as a rank, with a process group when there are several, taken down at the end.

    A rank that waits for the others for more than `hang_timeout` seconds gives up, sooner or later. With `alone` false
    one process makes a group too.
    """
    rank = int(os.environ.get("RANK", "0"))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(local_rank())
    ranks = Ranks(rank, world_size, local_rank(), device)
    if world_size == 1 and alone:
        yield ranks
        return
    record_collectives()
    # Longer than the watch over the loop waits, which has more to say when it gives up.
    timeout = timedelta(seconds=2 * hang_timeout + 60)
    # Host collectives go over gloo also where the device's go over NCCL.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=_meeting_point(world_size, timeout),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _meeting_point(world_size: int, timeout: timedelta) -> Store:
    """The store in which ranks find each other. A restart must not find the addresses of the dead in it."""
    if world_size == 1:
        return HashStore()
    if folder := os.environ.get(LAUNCH_FOLDER):
        # On one machine a file needs no port, which others could reach or take.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        return FileStore(str(Path(folder) / f"store-{attempt()}"), world_size)
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(f"attempt-{attempt()}", store)


def first_device() -> torch.device:
    """What this machine has, for looking at. A launcher that took it would keep half a gigabyte of it from rank 0."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


def choose_device(place: int) -> torch.device:
    """The device of this machine's process number `place`."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if place >= torch.cuda.device_count():
        raise UserMistake(
            f"This is process {place + 1} on this machine, which has {torch.cuda.device_count()} CUDA devices; "
            "start one process a device."
        )
    device = torch.device("cuda", place)
    torch.cuda.set_device(device)
    if not any(name in os.environ for name in ALLOCATOR_SETTINGS):
        # Memory that grows in place: sharded training asks for pieces of so many sizes that fixed ones lie about idle.
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    return device


def processes_wanted(config: Config) -> int:
    """How many processes this machine should run."""
    wanted = config.hardware.devices
    if config.hardware.nodes > 1:
        raise UserMistake(
            f"hardware.nodes is {config.hardware.nodes}, but this process was started alone; start shoal on every node "
            "with torchrun: torchrun --nnodes N --nproc-per-node DEVICES --rdzv-backend c10d --rdzv-endpoint HOST:PORT "
            "-m shoal train FILE"
        )
    return max(1, cuda_devices()) if wanted == "auto" else check_processes(wanted, "hardware.devices")


def cuda_devices() -> int:
    """How many this machine has."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def check_processes(wanted: int, asked: str) -> int:
    """`wanted`, if this machine can run so many; `asked` is what the user calls the number."""
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
