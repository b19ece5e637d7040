"""The loss on held-out rows."""

import math

import torch

from shoal.data.loader import evaluation_batches
from shoal.data.prepare import Sets
from shoal.parallel.apply import ParallelModel
from shoal.parallel.ranks import Ranks


@torch.no_grad()
def evaluate(
    model: ParallelModel, sets: Sets, *, micro_batch: int, rows: int, pad: int, ranks: Ranks
) -> dict[str, float]:
    """Mean loss per target token, and its exponential. The same first `rows` held-out rows whatever the
    number of ranks and their micro-batch."""
    assert sets.validation is not None
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    model.module.eval()
    for batch in evaluation_batches(
        sets.validation,
        sets.order.validation_rows(),
        micro_batch=micro_batch,
        rank=ranks.rank,
        ranks=ranks.world_size,
        pad=pad,
        limit=rows,
    ):
        loss_sum, count = model(batch.to(ranks.device))
        sums += torch.stack([loss_sum.double(), count.double()])
    model.module.train()
    total, count = ranks.sum(sums).tolist()
    mean = total / max(count, 1.0)
    return {"eval_loss": mean, "eval_perplexity": math.exp(min(mean, 700.0))}
