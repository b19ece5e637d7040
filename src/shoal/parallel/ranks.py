"""This process among its peers: which rank it is, on which device, and the few things all ranks decide together."""

from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Who this process is. One process alone has no process group, and every method is then free."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: the one that all ranks joined

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            # An all-reduce on the host: NCCL's barrier would make the host wait for the device as well.
            dist.all_reduce(torch.zeros(1), group=self.group)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; the host does not wait."""
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

    def told(self, text: str) -> str:
        """Rank 0's `text`, on every rank."""
        if self.world_size == 1:
            return text
        size = torch.tensor([len(text.encode()) if self.first else 0])
        dist.broadcast(size, 0, group=self.group)
        letters = torch.tensor(list(text.encode() if self.first else bytes(int(size))), dtype=torch.uint8)
        if int(size):
            dist.broadcast(letters, 0, group=self.group)
        return bytes(letters.tolist()).decode()

    def apart(self) -> "Ranks":
        """The same ranks, meeting on the host in a group of their own: for a thread that must not come between the
        collectives of training. Waiting there may take as long as a disk does."""
        if self.world_size == 1:
            return self
        return replace(self, group=dist.new_group(backend="gloo", timeout=timedelta(days=1), group_desc="saves"))
