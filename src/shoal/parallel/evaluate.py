"""The loss on held-out sequences, during and after training. The sequences do not depend on the number of ranks."""

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
    """The result of an evaluation."""

    loss: float  # mean over loss tokens
    loss_tokens: int
    sequences: int

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))  # exp of more overflows a float


def held_out_loss(
    measure: Measure,
    sets: Sets,
    *,
    micro_batch: int,
    sequences: int | None,
    pad: int,
    ranks: Ranks,
    share: tuple[int, int] = (0, 1),
    length: int | None = None,
    multiple: int = 1,
    at_once: int = 1,
) -> HeldOut:
    """Mean loss per loss token of the first `sequences` held-out sequences (None: of all).

    `measure` maps `at_once` micro-batches to (loss sum, number of loss tokens); the sums over all ranks count each
    sequence once. This rank evaluates shard `share[0]` of `share[1]`.
    """
    assert sets.validation is not None
    wanted = sets.order.validation_sequences()[:sequences]
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
    while batches := list(islice(found, at_once)):
        sums += measure(batches)
    total, loss_tokens = ranks.sum(sums).tolist()
    return HeldOut(total / max(loss_tokens, 1.0), int(loss_tokens), len(wanted))
