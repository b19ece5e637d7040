"""A cache of folders: each is complete or absent, and is built by one process while the others wait."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from shoal.files import sync
from shoal.mistakes import UserMistake

CONTENTS = "contents.json"  # name → [size, checksum] of every other file; written last
_BLOCK = 1 << 20
_BLOCKS = 64

Report = Callable[[str], None]


def obtain(root: Path, key: str, build: Callable[[Path], None], report: Report) -> tuple[Path, bool]:
    """The folder of `key` under `root`, and whether it was cached. If not, `build` fills it."""
    entry = root / key
    if is_complete(entry):
        return entry, True
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root / f"{key}.lock", report):
            if is_complete(entry):  # built by another process while this one waited
                return entry, True
            if entry.exists():
                report(f"The prepared data in {entry} is damaged or incomplete and is rebuilt.")
            build_folder(entry, build)
    except OSError as error:
        raise unusable_cache(root, error) from error
    return entry, False


def unusable_cache(root: Path, error: OSError) -> UserMistake:
    """The mistake for an error of the file system in the cache `root`."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        problem = "is on a full disk"
    elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        problem = "cannot be written"
    else:
        problem = f"cannot be used ({error.strerror})"
    return UserMistake(f"The cache {root} {problem}. Set SHOAL_CACHE to a writable folder with enough space.")


def build_folder(entry: Path, build: Callable[[Path], None], *, durable: bool = True) -> None:
    """Let `build` fill a folder, which becomes `entry` when it is complete and, if `durable`, on disk."""
    for leftover in entry.parent.glob(f"{entry.name}.new-*"):  # of a process that died: this one holds the lock
        shutil.rmtree(leftover, ignore_errors=True)
    folder = entry.with_name(f"{entry.name}.new-{os.getpid()}")
    folder.mkdir()
    try:
        build(folder)
        if durable:
            files = sorted(folder.iterdir())
            with ThreadPoolExecutor() as pool:
                contents = dict(zip([file.name for file in files], pool.map(_sync_and_describe, files), strict=True))
            (folder / CONTENTS).write_text(json.dumps(contents, indent=2) + "\n")
            sync(folder / CONTENTS)
            sync(folder)
        # A damaged entry may be memory-mapped by a running process, which keeps its files after removal.
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        folder.rename(entry)
        if durable:
            sync(entry.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _sync_and_describe(file: Path) -> tuple[int, str]:
    sync(file)
    return file.stat().st_size, checksum(file)


def is_complete(entry: Path) -> bool:
    """Whether every file exists with the recorded size and checksum, and every other is recorded."""
    try:
        contents = json.loads((entry / CONTENTS).read_text())
        listed = {file.name for file in entry.iterdir()} == {CONTENTS, *contents}
        return listed and all(
            (entry / name).stat().st_size == size and checksum(entry / name) == expected
            for name, (size, expected) in contents.items()
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return False


def checksum(file: Path) -> str:
    """A hash of the whole file up to 64 MiB; of 64 evenly spaced blocks of a larger one, so that startup stays quick.

    It detects what a crash leaves (missing ends, runs of zeros); a single flipped bit in a large file may go unnoticed.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = file.stat().st_size
    last = max(size - _BLOCK, 0)
    with file.open("rb") as stream:
        if size <= _BLOCK * _BLOCKS:
            offsets = range(0, max(size, 1), _BLOCK)
        else:
            offsets = range(0, last + 1, max(last // (_BLOCKS - 1), 1))
        for offset in offsets:
            stream.seek(offset)
            digest.update(stream.read(_BLOCK))
        stream.seek(last)
        digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


@contextmanager
def _exclusive(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is preparing the same data; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        # The lock is released when the file closes, also when this process is killed. The empty file stays: removing it
        # would let a third process lock a new file while the second still holds the old one.
        yield
