"""The metrics of held-out sequences, during and after training. The sequences do not depend on the number of ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from shoal.data.loader import MicroBatch, evaluation_batches
from shoal.data.sets import Sets
from shoal.objectives.objective import Objective
from shoal.parallel.ranks import Ranks

Measure = Callable[[Sequence[MicroBatch]], Tensor]


@dataclass(frozen=True)
class HeldOut:
    """The result of an evaluation."""

    metrics: dict[str, float]  # of the objective: loss, perplexity, …
    weight: int  # loss tokens, or examples
    sequences: int


def evaluate_held_out(
    measure: Measure,
    sets: Sets,
    objective: Objective,
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
    """Metrics of the first `sequences` held-out sequences (None: of all).

    `measure` maps `at_once` micro-batches to the objective's sums; those of all ranks count each sequence once. This
    rank evaluates shard `share[0]` of `share[1]`.
    """
    assert sets.validation is not None
    wanted = sets.order.validation_sequences()[:sequences]
    sums = torch.zeros(len(objective.sums), dtype=torch.float64, device=ranks.device)
    found = evaluation_batches(
        sets.validation,
        wanted,
        micro_batch=micro_batch,
        rank=share[0],
        ranks=share[1],
        pad=pad,
        length=length,
        multiple=multiple,
        collate=objective.collate,
    )
    while batches := list(islice(found, at_once)):
        sums += measure(batches)
    total = dict(zip(objective.sums, ranks.sum(sums).tolist(), strict=True))
    return HeldOut(objective.metrics(total), int(total["weight"]), len(wanted))
