"""When each rank on this machine was last seen, and what it was doing: a small file that all of them have mapped.

A rank that is stopped or stuck cannot be asked; what it wrote here before is still there.
"""

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

_SLOT = struct.Struct("<qqd40s")
ENDED, GONE, STOPPED = "ended", "is gone", "is stopped"


@dataclass(frozen=True)
class Heartbeat:
    """The last sign of life of a rank."""

    process: int  # 0: it has not begun
    step: int
    when: float  # on the machine's monotonic clock, which all of its processes share
    doing: str

    @property
    def died(self) -> bool:
        """Whether the process is gone without having come to its end."""
        return bool(self.process) and self.doing != ENDED and self.state == GONE

    @property
    def state(self) -> str:
        """What the system says the process is doing."""
        try:
            letter = Path(f"/proc/{self.process}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return GONE if Path("/proc/self/stat").exists() else "gives no answer"
        return {"T": STOPPED, "D": "waits for a disk", "Z": GONE}.get(letter, "gives no answer")


class Heartbeats:
    """One slot a rank. `path` None: this process alone."""

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

    def write(self, step: int, doing: str) -> None:
        letters = doing.encode()[:40]
        _SLOT.pack_into(self._memory, self.rank * _SLOT.size, os.getpid(), step, time.monotonic(), letters)

    def read(self, rank: int) -> Heartbeat:
        process, step, when, letters = _SLOT.unpack_from(self._memory, rank * _SLOT.size)
        return Heartbeat(process, step, when, letters.rstrip(b"\0").decode(errors="replace"))
