"""The next token: the cross-entropy of every loss token, its mean over loss tokens, and its perplexity."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from shoal.data.loader import MicroBatch, collate_next_token, count_loss_tokens
from shoal.data.sequences import Sequences
from shoal.models.anatomy import Anatomy
from shoal.models.cross_entropy import Measure
from shoal.models.loss import LanguageModel

LARGEST_EXPONENT = 700.0  # exp of more overflows a float


class CausalLM:
    """`train.objective: causal_lm`."""

    name = "causal_lm"
    sums = ("loss", "weight")

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
        return collate_next_token(sequences, sequence_ids, pad=pad, length=length, multiple=multiple)

    def weight(self, sequences: Sequences, sequence_ids: np.ndarray) -> int:
        return count_loss_tokens(sequences, sequence_ids)

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
        return LanguageModel(model, anatomy, loss, measure, skips_tiles=skips_tiles, matmul_dtype=matmul_dtype)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        loss = sums["loss"] / max(sums["weight"], 1.0)
        perplexity = math.exp(min(loss, LARGEST_EXPONENT)) if math.isfinite(loss) else math.nan
        return {"loss": loss, "perplexity": perplexity}
