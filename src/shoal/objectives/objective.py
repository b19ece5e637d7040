"""Training objectives: labels, the loss and its weight, auxiliary losses, and evaluation metrics.

The loss of a step is one quotient, whatever the split: the sums of all micro-batches and ranks over their weight.

    loss = Σ sums["loss"] / Σ sums["weight"]

To add an objective, write a class with these members in a file of this folder and add it to `objectives.OBJECTIVES`,
which makes it from the config of a run:

- masked LM: `collate` masks tokens and labels them; see `objectives.masked_lm`.
- classification: `weight` counts examples; see `objectives.classify`.
- preference pairs: `weight` counts pairs; see `objectives.preference`, and `objectives.unpaired` for single answers.
- a router's auxiliary loss: the module's `losses` adds it to `trained`, times the weight of its micro-batch so that the
  step's total is again a mean, and to `sums` under a name of its own, so that it is reported beside the loss.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from shoal.data.loader import MicroBatch
from shoal.data.sequences import Sequences
from shoal.models.anatomy import Anatomy
from shoal.models.cross_entropy import Measure
from shoal.models.loss import LanguageModel


class Objective(Protocol):
    """See `objectives.causal_lm.CausalLM` for the first one."""

    @property
    def name(self) -> str:
        """The value of `train.objective`."""

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of what the module sums: first "loss", second "weight", then what else `metrics` needs."""

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
        """The micro-batch of these sequences, with its labels. Depends on nothing but its arguments and the data, so
        that every world size trains on the same labels. `positions`: where each sequence stands in the global order of
        training, for what is drawn anew in every epoch; None: in evaluation."""

    def weight(self, sequences: Sequences, sequence_ids: np.ndarray) -> int:
        """The sum of weights of these sequences, from the data alone: it is known before the step is computed."""

    def module(
        self,
        model: Any,
        anatomy: Anatomy,
        loss: str,
        measure: Measure | None = None,
        *,
        skips_tiles: bool = False,
        matmul_dtype: torch.dtype | None = None,
    ) -> LanguageModel:
        """The module that is wrapped and trained: from a micro-batch to `LossSums`. `loss` is `train.loss_impl`."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """The metrics of an evaluation, by name without `eval_`: "loss" and others. Training logs them as well, if
        there are more sums than the loss and its weight."""
