"""Cross-entropy of logits whose vocabulary is split over tensor-parallel ranks: no rank has a whole row of them."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.models.loss import IGNORED


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's tokens, from `start` on. Called as `models.loss.Measure`."""

    start: int
    group: dist.ProcessGroup

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        dtype, logits = logits.dtype, logits.to(torch.float32, copy=True)
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        local = labels - self.start
        here = (local >= 0) & (local < logits.shape[1])
        place = torch.where(here, local, 0)[:, None]
        target = torch.where(here, logits.gather(1, place).squeeze(1), 0.0)
        shares = logits.sub_(highest[:, None]).exp_()
        # Two sums in one exchange: of the exponentials, and of the target's logit, which one rank alone has.
        sums = torch.stack([shares.sum(dim=-1), target])
        dist.all_reduce(sums, group=self.group)
        counted = labels != IGNORED
        loss = torch.where(counted, sums[0].log() + highest - sums[1], 0.0).sum()
        shares.div_(sums[0][:, None])
        shares.scatter_add_(1, place, -here.to(shares.dtype)[:, None])
        return loss, shares.mul_(counted[:, None]).to(dtype)
