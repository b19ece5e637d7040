"""The loss on held-out rows, the same rows whatever the number of ranks: while training, and afterwards."""

import math
from dataclasses import dataclass

import torch
from torch import nn

from shoal.data.loader import evaluation_batches
from shoal.data.prepare import Sets
from shoal.parallel.ranks import Ranks


@dataclass(frozen=True)
class HeldOut:
    """What was found on how much."""

    loss: float  # mean over target tokens
    targets: int
    rows: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # more than that is no float


@torch.no_grad()
def held_out_loss(
    module: nn.Module, sets: Sets, *, micro_batch: int, rows: int | None, pad: int, ranks: Ranks
) -> HeldOut:
    """Mean loss per target token of the first `rows` held-out rows (None: of all), by a module that turns a micro-batch
    into (loss sum, target count)."""
    assert sets.validation is not None
    wanted = sets.order.validation_rows()[:rows]
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    training = module.training
    module.eval()
    for batch in evaluation_batches(
        sets.validation, wanted, micro_batch=micro_batch, rank=ranks.rank, ranks=ranks.world_size, pad=pad
    ):
        loss_sum, count = module(batch.to(ranks.device))
        sums += torch.stack([loss_sum.double(), count.double()])
    module.train(training)
    total, targets = ranks.sum(sums).tolist()
    return HeldOut(total / max(targets, 1.0), int(targets), len(wanted))
