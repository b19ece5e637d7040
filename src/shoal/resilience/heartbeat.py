"""The last heartbeat of each rank on this node, in a small file that all of them map into memory.

A rank that is stopped or stuck does not answer, but its last heartbeat can still be read.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_SLOT = struct.Struct("<qqd40s")
ENDED, DEAD, STOPPED = "ended", "is dead", "is stopped"


@dataclass(frozen=True)
class Heartbeat:
    """The last heartbeat of a rank."""

    process: int  # 0: not started yet
    step: int
    when: float  # monotonic clock, which all processes of a node share
    activity: str

    @property
    def died(self) -> bool:
        """Whether the process died before its end."""
        return bool(self.process) and self.activity != ENDED and self.state == DEAD

    @property
    def state(self) -> str:
        """The state of the process, from /proc."""
        try:
            letter = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        except (OSError, IndexError):  # or nothing to read: it ends at this moment
            return DEAD if Path("/proc/self/stat").exists() else "does not respond"
        return {"T": STOPPED, "D": "waits for disk I/O", "Z": DEAD}.get(letter, "does not respond")


class Heartbeats:
    """One slot per rank. `path` None: not shared with other processes."""

    def __init__(self, path: Path | None, rank: int, world_size: int) -> None:
        self.rank = rank
        self.shared = path is not None
        size = _SLOT.size * world_size
        if path is None:
            self._memory = mmap.mmap(-1, size)
        else:
            file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            os.ftruncate(file, size)
            self._memory = mmap.mmap(file, size)
            os.close(file)

    def write(self, step: int, activity: str) -> None:
        text = activity.encode()[:40]
        _SLOT.pack_into(self._memory, self.rank * _SLOT.size, os.getpid(), step, time.monotonic(), text)

    def read(self, rank: int) -> Heartbeat:
        process, step, when, text = _SLOT.unpack_from(self._memory, rank * _SLOT.size)
        return Heartbeat(process, step, when, text.rstrip(b"\0").decode(errors="replace"))
