"""This process's rank and device, and small collectives on the host."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Rank, world size and device. A single process has no process group, and every method is then a no-op."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: the default group

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            # An all-reduce on the host: NCCL's barrier would also synchronize the host with the device.
            dist.all_reduce(torch.zeros(1), group=self.group)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over all ranks, in place. Does not synchronize the host with the device."""
        if self.world_size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def largest(self, value: float) -> float:
        """The largest `value` of any rank, on the host."""
        if self.world_size == 1:
            return value
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX, group=self.group)
        return float(held)

    def smallest(self, value: float) -> float:
        return -self.largest(-value)

    def broadcast(self, text: str) -> str:
        """Rank 0's `text`, on every rank."""
        if self.world_size == 1:
            return text
        size = torch.tensor([len(text.encode()) if self.first else 0])
        dist.broadcast(size, 0, group=self.group)
        encoded = torch.tensor(list(text.encode() if self.first else bytes(int(size))), dtype=torch.uint8)
        if int(size):
            dist.broadcast(encoded, 0, group=self.group)
        return bytes(encoded.tolist()).decode()

    def separate_group(self) -> "Ranks":
        """The same ranks with a Gloo group of their own, for a thread whose collectives must not interleave with those
        of training. The timeout is long because ranks wait for each other's disks."""
        if self.world_size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(days=1), group_desc="saves"))
