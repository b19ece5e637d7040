"""Preference tuning on single answers, each with a label: desirable or not.

An answer is a pair of which the other one is missing: the document k of a sequence becomes document 2k if it is
desirable, and 2k + 1 if it is not. So its label travels with the documents through every way to split a batch.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shoal.data.loader import MicroBatch
from shoal.data.sequences import DESIRABLE, DOCUMENT, Sequences
from shoal.objectives.pair_losses import Compared
from shoal.objectives.preference import PairModel, Preference


class Unpaired(Preference):
    """`train.objective: apo_zero_unpaired`."""

    counted, documents = "examples", 1
    sums = (
        "loss",
        "weight",
        "chosen",  # how many
        "rejected",
        "rewards/chosen",
        "rewards/rejected",
        "logps/chosen",
        "logps/rejected",
    )

    def collate(
        self,
        sequences: Sequences,
        sequence_ids: np.ndarray,
        *,
        pad: int,
        length: int | None = None,
        multiple: int = 1,
        positions: np.ndarray | None = None,
    ) -> MicroBatch:
        batch = super().collate(sequences, sequence_ids, pad=pad, length=length, multiple=multiple)
        assert batch.documents is not None, "sequences with labels are collated with documents"
        # The padding is a document too, the last one of a sequence; its label does not matter.
        undesirable = torch.zeros(len(sequence_ids), int(batch.documents.max()) + 1, dtype=torch.int32)
        for row, index in enumerate(sequence_ids.tolist()):
            flags = sequences[index][1]
            labels = flags[(flags & DOCUMENT) != 0] & DESIRABLE
            undesirable[row, : len(labels)] = torch.from_numpy((labels == 0).astype(np.int32))
        documents = 2 * batch.documents + undesirable.gather(1, batch.documents.long())
        return replace(batch, documents=documents)

    def model_class(self) -> type[PairModel]:
        return UnpairedModel

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = {"loss": sums["loss"] / max(sums["weight"], 1.0)}
        for name in self.sums[4:]:
            count = sums[name.partition("/")[2]]
            found[name] = sums[name] / count if count else math.nan
        return found | {"rewards/margins": found["rewards/chosen"] - found["rewards/rejected"]}


class UnpairedModel(PairModel):
    """A language model with the loss of single answers."""

    def _sum(self, found: Compared, present: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        each = [
            torch.where(present, one.detach(), 0.0).flatten(0, -2).sum(0).unbind()
            for one in (found.rewards, found.logps)
        ]
        counts = present.flatten(0, -2).sum(0)
        return found.losses.sum(), (counts.sum(), *counts.unbind(), *each[0], *each[1])
