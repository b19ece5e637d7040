"""Shared memory, limits, cores and memory of this node."""

import os
import resource
from pathlib import Path

from shoal.launch.doctor.finding import Finding, failure, ok, warning
from shoal.launch.doctor.network import active_infiniband
from shoal.launch.doctor.setting import Setting

SHARED_MEMORY = Path("/dev/shm")
GROUP_LIMITS = Path("/sys/fs/cgroup")
MIB, GIB = 2**20, 2**30
# NCCL's buffers in shared memory per process, at the least, and what it uses with many channels.
LEAST_SHARED, PLENTY_SHARED = 16 * MIB, GIB
# Open files of a process: sockets to every rank, data and checkpoint files.
LEAST_FILES, PLENTY_FILES = 256, 1024
# Threads of a rank: of the autograd engine, the data loader, NCCL and OpenMP.
THREADS = 64
CORES = 2  # per device: one launches kernels, one loads data


def check_shared_memory(setting: Setting) -> Finding:
    if not SHARED_MEMORY.is_dir():
        return ok(f"no {SHARED_MEMORY} on this system")
    space = os.statvfs(SHARED_MEMORY)
    total, free = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    found = f"{_size(free)} free of {_size(total)}"
    remedy = (
        "in a container start it with --shm-size=8g or --ipc=host (Kubernetes: an emptyDir with medium Memory); "
        if total <= GIB
        else f"remove what is left in {SHARED_MEMORY}; "
    ) + "NCCL needs it between processes"
    if free < LEAST_SHARED * max(2, setting.devices):
        return failure(found, remedy)
    return warning(found, remedy) if free < PLENTY_SHARED else ok(found)


def check_open_files(setting: Setting) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = PLENTY_FILES + 4 * setting.devices * setting.nodes
    found = f"ulimit -n {_limit(soft)} (hard {_limit(hard)})"
    if _unlimited(soft) or soft >= needed:
        return ok(found)
    remedy = f"ulimit -n {needed if _unlimited(hard) or hard >= needed else hard}, before shoal train"
    if not _unlimited(hard) and hard < needed:
        remedy += f"; {needed} needs a higher hard limit in /etc/security/limits.conf"
    return failure(found, remedy) if soft < LEAST_FILES else warning(found, remedy)


def check_locked_memory(setting: Setting) -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    found = f"ulimit -l {_limit(soft if _unlimited(soft) else soft // 1024)}"
    if not active_infiniband():
        return ok(f"{found}; no InfiniBand, which would need it")
    if _unlimited(soft) or os.geteuid() == 0:
        return ok(found)
    return failure(
        f"{found}, and InfiniBand registers all buffers",
        "set memlock to unlimited in /etc/security/limits.conf, or LimitMEMLOCK=infinity for slurmd",
    )


def check_processes(setting: Setting) -> Finding:
    """Processes and threads: the limit of the user, and that of the container."""
    needed = THREADS * setting.devices
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if not _unlimited(soft) and os.geteuid() != 0:  # the kernel does not apply it to root
        used = _threads_of_user()
        found = f"ulimit -u {soft}, of which {used} are in use"
        if soft - used < needed:
            return failure(found, f"ulimit -u {used + needed} or more, or end other processes")
    else:
        found = f"ulimit -u {_limit(soft)}"
    most, running = _group_value("pids.max"), _group_value("pids.current")
    if most is not None and running is not None:
        found += f", {most} in this container"
        if most - running < needed:
            return failure(f"{found}, of which {running} are in use", "raise the container's limit (--pids-limit)")
    return ok(found)


def check_cores(setting: Setting) -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here, devices = os.cpu_count() or 1, setting.devices
    found = f"{cores} of {here} cores for {devices} device{'s' * (devices > 1)}"
    # A task of srun has the cores of its own device.
    mine = 1 if "SLURM_PROCID" in os.environ and devices > 1 and cores < here else devices
    if setting.driver.gpus and cores < CORES * mine:
        return warning(
            found,
            f"ask for at least {CORES} cores per device (Slurm: --cpus-per-task); a GPU waits for a core that is busy",
        )
    return ok(found)


def check_memory(setting: Setting) -> Finding:
    """Memory of the host, or of the container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    free = _available() or total
    found = f"{_size(free)} free of {_size(total)}"
    most, used = _group_value("memory.max"), _group_value("memory.current")
    if most is not None and most < total:
        cached = _group_stat("file") or 0
        free = min(free, most - (used or 0) + cached)
        found = f"{_size(free)} free of {_size(most)}, the limit of this container or job"
    if free < GIB * setting.devices:
        return warning(found, "end other processes, or ask the scheduler for more memory (Slurm: --mem)")
    return ok(found)


def _available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _group_folder() -> Path | None:
    """The control group of this process (version 2)."""
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        return None
    for line in own.splitlines():
        if line.startswith("0::"):
            folder = GROUP_LIMITS / line[3:].lstrip("/")
            return folder if folder.is_dir() else GROUP_LIMITS
    return None


def _group_value(name: str) -> int | None:
    """A limit or a count of the control group; None: none is set."""
    folder = _group_folder()
    try:
        return None if folder is None else int((folder / name).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def _group_stat(name: str) -> int | None:
    folder = _group_folder()
    try:
        for line in (folder / "memory.stat").read_text().splitlines() if folder is not None else []:
            if line.startswith(f"{name} "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return None


def _threads_of_user() -> int:
    """The kernel counts threads, of all processes of the user."""
    found = 0
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if process.stat().st_uid == os.getuid():
                found += sum(1 for _ in (process / "task").iterdir())
        except OSError:  # ended meanwhile
            continue
    return found


def _unlimited(limit: int) -> bool:
    return limit == resource.RLIM_INFINITY


def _limit(limit: int) -> str:
    return "unlimited" if _unlimited(limit) else str(limit)


def _size(size: float) -> str:
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.0f} MiB"
