"""A folder per key that is whole or does not exist, built by one process while the others wait."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.files import sync
from shoal.mistakes import UserMistake

CONTENTS = "contents.json"  # name → [size, imprint] of every other file; written last
_BLOCK = 1 << 20
_BLOCKS = 64

Report = Callable[[str], None]


def cache_root(given: Path | None = None) -> Path:
    """The folder for everything that can be made again: as given, or SHOAL_CACHE, or ~/.cache/shoal."""
    if given is not None:
        return Path(given)
    named = os.environ.get("SHOAL_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "shoal"


def obtain(root: Path, key: str, build: Callable[[Path], None], report: Report) -> tuple[Path, bool]:
    """The folder of `key` under `root`, and whether it was there already. Otherwise `build` fills it."""
    entry = root / key
    if is_whole(entry):
        return entry, True
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _alone(root / f"{key}.lock", report):
            if is_whole(entry):  # built by another process while this one waited
                return entry, True
            if entry.exists():
                report(f"The prepared data in {entry} is damaged or incomplete; it is made again.")
            _build(entry, build)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            problem = "is on a full disk"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            problem = "cannot be written"
        else:
            raise
        raise UserMistake(f"The cache {root} {problem}. Set SHOAL_CACHE to a folder with room for it.") from error
    return entry, False


def _build(entry: Path, build: Callable[[Path], None]) -> None:
    for leftover in entry.parent.glob(f"{entry.name}.new-*"):  # of a process that died: we hold its lock
        shutil.rmtree(leftover, ignore_errors=True)
    folder = entry.with_name(f"{entry.name}.new-{os.getpid()}")
    folder.mkdir()
    try:
        build(folder)
        contents = {file.name: [file.stat().st_size, imprint(file)] for file in sorted(folder.iterdir())}
        (folder / CONTENTS).write_text(json.dumps(contents, indent=2) + "\n")
        for file in folder.iterdir():
            sync(file)
        sync(folder)
        # A damaged entry may be mapped by a running process, which keeps its files when they are removed.
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)
        folder.rename(entry)
        sync(entry.parent)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_whole(entry: Path) -> bool:
    """Whether every file is there, of its size and with its imprint."""
    try:
        contents = json.loads((entry / CONTENTS).read_text())
        return bool(contents) and all(
            (entry / name).stat().st_size == size and imprint(entry / name) == mark
            for name, (size, mark) in contents.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):
        return False


def imprint(file: Path) -> str:
    """A hash of the whole file up to 64 MiB; of 64 blocks spread over a larger one, so that a start stays quick.

    What a crash leaves behind (missing ends, runs of zeros) shows; a single flipped bit in a large file may not.
    """
    digest = hashlib.blake2b(digest_size=16)
    size = file.stat().st_size
    last = max(size - _BLOCK, 0)
    with file.open("rb") as stream:
        if size <= _BLOCK * _BLOCKS:
            places = range(0, max(size, 1), _BLOCK)
        else:
            places = range(0, last + 1, max(last // (_BLOCKS - 1), 1))
        for place in places:
            stream.seek(place)
            digest.update(stream.read(_BLOCK))
        stream.seek(last)
        digest.update(stream.read(_BLOCK))
    return digest.hexdigest()


@contextmanager
def _alone(path: Path, report: Report) -> Iterator[None]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            report("Another process is preparing the same data; waiting for it.")
            fcntl.flock(file, fcntl.LOCK_EX)
        # The lock ends with the file, also when this process is killed. The empty file stays: removing it would let
        # a third process lock a new one while the second still holds the old.
        yield
