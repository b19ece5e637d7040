"""The run directory: may it be written, is there room, how fast is it, and does it have locks."""

import fcntl
import os
import re
import tempfile
import time
from pathlib import Path

from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.shapes import parameters
from shoal.config.schema import Config
from shoal.launch.doctor.finding import Finding, failure, ok, warning
from shoal.launch.doctor.setting import Setting
from shoal.mistakes import UserMistake
from shoal.paths import cache_root

GB = 1e9
# The measurement ends after this time or amount. Each block is flushed to the disk: what is only in the page cache says
# nothing, and flushing all of it at the end could take minutes on a slow disk.
SECONDS, BLOCK, MOST = 1.0, 8 * 2**20, 512 * 2**20
USUAL, LOWEST = 50e6, 5e6  # bytes per second
LEAST_FREE = 1e9
CLOCK_SKEW = 2.0  # seconds between this node and a file server


def check_run_folder(setting: Setting) -> Finding:
    """It can be written, has room for the checkpoints, and locks."""
    folder = setting.existing_folder
    kind = file_system(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                return failure(
                    f"{setting.folder} ({kind}) has no file locks: {error.strerror}",
                    "mount it with locks (NFS: local_lock=none and a lock service; Lustre: flock), or use --runs",
                )
    except OSError as error:
        return failure(
            f"{setting.folder} cannot be written: {error.strerror}",
            "use another folder: run_dir in the file, or --runs",
        )
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    found = f"{setting.folder} ({kind}), {free / GB:.1f} GB free"
    if space.f_files and not space.f_favail:
        return failure(f"{found}, but no inodes", "remove files there, or use another folder")
    size = None if setting.config is None else checkpoint_bytes(setting.config)
    if setting.config is not None and size is not None:
        kept = setting.config.checkpoint.keep + setting.config.checkpoint.keep_best + 1
        found += f"; a checkpoint has {size / GB:.2g} GB, up to {kept} at a time"
        if free < size:
            return failure(found, "free some space, or use another disk: run_dir in the file, or --runs")
        if free < size * kept:
            return warning(
                found, "lower checkpoint.keep and checkpoint.keep_best, free some space, or use another disk"
            )
    if free < LEAST_FREE:
        return warning(found, "free some space, or use another disk: run_dir in the file, or --runs")
    if kind in ("tmpfs", "ramfs"):
        return warning(f"{found}; it is in memory", "use a folder on a disk: a restart of the node would lose the run")
    return ok(found)


def check_disk_speed(setting: Setting) -> Finding:
    """Bytes per second that are written and flushed."""
    try:
        speed = measure_disk(setting.existing_folder)
    except OSError:
        return ok("not measured: the run directory cannot be written")  # which is a failure of its own
    found = f"{speed / 1e6:,.0f} MB/s written and flushed"
    size = None if setting.config is None else checkpoint_bytes(setting.config)
    if size is not None:
        found += f"; a checkpoint takes about {size / speed:,.0f} s"
    remedy = "use a faster disk for run_dir, or save less often (checkpoint.every); others may be using it now"
    if speed < LOWEST:
        return failure(found, remedy)
    return warning(found, remedy) if speed < USUAL else ok(found)


def check_cache(setting: Setting) -> Finding:
    """The folder for tokenized data."""
    try:
        root = cache_root()
    except UserMistake as mistake:
        return failure(str(mistake), "set SHOAL_CACHE to a folder")
    folder = root.absolute()
    while not folder.is_dir():
        folder = folder.parent
    space = os.statvfs(folder)
    found = f"{root} ({file_system(folder)}), {space.f_bavail * space.f_frsize / GB:.1f} GB free"
    remedy = "set SHOAL_CACHE to a folder on a disk with room"
    if not os.access(folder, os.W_OK):
        return failure(f"{found}; it cannot be written", remedy)
    return warning(found, remedy) if space.f_bavail * space.f_frsize < LEAST_FREE else ok(found)


def check_file_clock(setting: Setting) -> Finding:
    """The clock of a file server, which sets the times of files, against this node's."""
    try:
        with tempfile.NamedTemporaryFile(dir=setting.existing_folder, prefix=".doctor-") as file:
            file.write(b"now")
            file.flush()
            skew = os.stat(file.name).st_mtime - time.time()
    except OSError:
        return ok("not measured: the run directory cannot be written")  # which is a failure of its own
    if abs(skew) > CLOCK_SKEW:
        return warning(
            f"files in {setting.folder} are {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} this node's clock",
            "synchronize the clocks (chronyc tracking)",
        )
    return ok("as the files of the run directory")


def measure_disk(folder: Path) -> float:
    """Bytes per second, in about a second. The file has no name while it is measured, so nothing is left behind."""
    block = os.urandom(BLOCK)  # a file system may compress
    with tempfile.TemporaryFile(dir=folder) as file:
        began, written = time.perf_counter(), 0
        while written < MOST and (written == 0 or time.perf_counter() - began < SECONDS):
            file.write(block)
            flush(file.fileno())
            written += BLOCK
        return written / (time.perf_counter() - began)


def flush(descriptor: int) -> None:
    os.fsync(descriptor)


def file_system(folder: Path) -> str:
    """The kind of the file system, such as ext4, nfs4, lustre or overlay."""
    best, kind = "", "unknown"
    try:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return kind
    real = os.path.realpath(folder)
    for line in mounts:
        _, place, found, *_ = line.split()
        place = re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), place)
        inside = real == place or real.startswith(place.rstrip("/") + "/")
        if inside and len(place) >= len(best):
            best, kind = place, found
    return kind


def checkpoint_bytes(config: Config) -> float | None:
    """The size of a checkpoint of full training; None for an adapter, which is small, and if the model is not here."""
    from shoal.plan.models import read_shape

    if config.adapter.kind != "none":
        return None
    try:
        shape = read_shape(config.model)
    except UserMistake:
        return None
    weight = 2 if config.train.precision == "bf16-true" else 4
    return parameters(shape) * (weight + find_optimizer(config.train.optimizer.name).bytes_per_parameter(weight))
