"""The content of files as a hash, remembered: a later start hashes nothing if no file has changed."""

import hashlib
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.data.progress import Progress
from shoal.files import write_atomically
from shoal.mistakes import UserMistake

# A file may change again within the resolution of its times: one that changed this recently is hashed again next time.
SETTLED = 2.0  # seconds

_BLOCK = 1 << 20
_DIGEST = re.compile(r"[0-9a-f]{64}")


class State(NamedTuple):
    """What tells that a file has changed, without reading it."""

    path: str
    size: int
    modified: int  # nanoseconds
    changed: int  # too: a copy may keep the time of modification
    inode: int


def read_states(files: Sequence[Path]) -> list[State]:
    try:
        states = [(str(file), file.stat()) for file in files]
    except OSError as error:  # a link to nowhere in a folder, or a file that was removed a moment ago
        raise UserMistake(f"{error.filename} cannot be read: {error.strerror}.") from None
    return [State(name, one.st_size, one.st_mtime_ns, one.st_ctime_ns, one.st_ino) for name, one in states]


def hash_contents(states: Sequence[State], folder: Path, progress: Progress) -> str:
    """A hash of the contents of these files, in order, with their suffixes, which decide how a file is read.

    Where the files are is not part of it: data that was moved or copied is the same data. `folder` remembers the hash.
    """
    known = folder / hashlib.blake2b(json.dumps(states).encode(), digest_size=16).hexdigest()
    try:
        digest = known.read_text()
        if _DIGEST.fullmatch(digest):
            return digest
    except (OSError, UnicodeDecodeError):
        pass
    now = time.time_ns()
    digest = _hash(states, progress)
    if all(now - max(one.modified, one.changed) > SETTLED * 1e9 for one in states):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(known, digest)
        except OSError:
            pass  # the cache reports that it cannot be written, if it has to be
    return digest


def _hash(states: Sequence[State], progress: Progress) -> str:
    whole = hashlib.blake2b(digest_size=32)
    total, done = sum(one.size for one in states), 0
    buffer = bytearray(_BLOCK)
    view = memoryview(buffer)
    for one in states:
        content = hashlib.blake2b(digest_size=32)
        try:
            with open(one.path, "rb", buffering=0) as file:
                while length := file.readinto(buffer):
                    content.update(view[:length])
                    done += length
                    progress.tick("Hashing the data", done >> 20, "MiB", done / max(total, 1))
        except OSError as error:
            raise UserMistake(
                f"{one.path} cannot be read ({error.strerror}). Check the path and its permissions."
            ) from error
        suffixes = "".join(Path(one.path).suffixes[-2:]).lower()
        whole.update(json.dumps([suffixes, content.hexdigest()]).encode())
    return whole.hexdigest()
