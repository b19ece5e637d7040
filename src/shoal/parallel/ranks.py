"""This process among its peers: which rank it is, on which device, and the few things all ranks decide together."""

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ranks:
    """Who this process is. One process alone has no process group, and every method is then free."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def barrier(self) -> None:
        if self.world_size > 1:
            # An all-reduce on the host: NCCL's barrier would make the host wait for the device as well.
            dist.all_reduce(torch.zeros(1))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place; the host does not wait."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def largest(self, value: float) -> float:
        """The largest `value` of any rank, on the host."""
        if self.world_size == 1:
            return value
        held = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)
        return float(held)

    def smallest(self, value: float) -> float:
        return -self.largest(-value)
