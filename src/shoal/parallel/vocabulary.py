"""Cross-entropy of logits that are split over tensor-parallel ranks along the vocabulary."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.models.loss import IGNORED


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's shard of the vocabulary, which begins at `start`. Implements `models.loss.Measure`."""

    start: int
    group: dist.ProcessGroup

    def __call__(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        dtype, logits = logits.dtype, logits.to(torch.float32, copy=True)
        highest = logits.max(dim=-1).values
        dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self.group)
        local = labels - self.start
        here = (local >= 0) & (local < logits.shape[1])
        index = torch.where(here, local, 0)[:, None]
        label_logits = torch.where(here, logits.gather(1, index).squeeze(1), 0.0)
        probabilities = logits.sub_(highest[:, None]).exp_()
        # Two sums in one all-reduce: of the exponentials, and of the label's logit, which is on one rank only.
        sums = torch.stack([probabilities.sum(dim=-1), label_logits])
        dist.all_reduce(sums, group=self.group)
        counted = labels != IGNORED
        loss = torch.where(counted, sums[0].log() + highest - sums[1], 0.0).sum()
        probabilities.div_(sums[0][:, None])
        probabilities.scatter_add_(1, index, -here.to(probabilities.dtype)[:, None])
        return loss, probabilities.mul_(counted[:, None]).to(dtype)
