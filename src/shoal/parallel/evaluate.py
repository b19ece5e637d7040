"""The loss on held-out rows, the same rows whatever the number of ranks: while training, and afterwards."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from shoal.data.loader import MicroBatch, evaluation_batches
from shoal.data.prepare import Sets
from shoal.parallel.ranks import Ranks

Measure = Callable[[Sequence[MicroBatch]], Tensor]


@dataclass(frozen=True)
class HeldOut:
    """What was found on how much."""

    loss: float  # mean over target tokens
    loss_tokens: int
    rows: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # more than that is no float


def held_out_loss(
    measure: Measure,
    sets: Sets,
    *,
    micro_batch: int,
    rows: int | None,
    pad: int,
    ranks: Ranks,
    share: tuple[int, int] = (0, 1),
    length: int | None = None,
    multiple: int = 1,
    at_once: int = 1,
) -> HeldOut:
    """Mean loss per target token of the first `rows` held-out rows (None: of all).

    `measure` turns `at_once` micro-batches into (loss sum, target count); the sums over all ranks count each row once.
    This rank takes part `share[0]` of `share[1]`.
    """
    assert sets.validation is not None
    wanted = sets.order.validation_sequences()[:rows]
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    found = evaluation_batches(
        sets.validation,
        wanted,
        micro_batch=micro_batch,
        rank=share[0],
        ranks=share[1],
        pad=pad,
        length=length,
        multiple=multiple,
    )
    while some := list(islice(found, at_once)):
        sums += measure(some)
    total, loss_tokens = ranks.sum(sums).tolist()
    return HeldOut(total / max(loss_tokens, 1.0), int(loss_tokens), len(wanted))
