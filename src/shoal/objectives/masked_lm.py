"""Masked language modelling: some tokens of each example are hidden, and the model predicts them from all others.

Which ones, and what stands in their place, is drawn from the seed and the example's position in the global order
(`data.masks`). In evaluation it is drawn from the seed and the number of the sequence: the same at every evaluation.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.config.schema import Config
from shoal.data.loader import MicroBatch
from shoal.data.masks import EVALUATION, TRAINING, eligible_tokens, make_masks, total_masked
from shoal.data.sequences import Sequences
from shoal.data.tokenizer_base import Tokenizer
from shoal.models.anatomy import Anatomy
from shoal.models.cross_entropy import IGNORED, Measure, kept_tokens
from shoal.models.loss import LossSums
from shoal.models.loss import MicroBatch as Batch
from shoal.objectives.causal_lm import LARGEST_EXPONENT
from shoal.objectives.encoder import EncoderModel, collate_examples

# From the last hidden state to the logits, by the names of the modules that follow each other; of a type that is not
# listed, the logits of all tokens are computed.
HEADS = {
    **dict.fromkeys(("bert", "megatron-bert", "ernie", "rembert", "roformer", "big_bird", "roc_bert"), ("cls",)),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "camembert", "roberta-prelayernorm", "data2vec-text", "xlm-roberta-xl"),
        ("lm_head",),
    ),
    "electra": ("generator_predictions", "generator_lm_head"),
    "distilbert": ("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
    "modernbert": ("head", "decoder"),
}


class MaskedLM:
    """`train.objective: masked_lm`."""

    name = "masked_lm"
    sums = ("loss", "weight", "correct")

    def __init__(self, config: Config, tokenizer: Tokenizer | None = None) -> None:
        self.ratio = config.train.mask_ratio
        self._masks = None if tokenizer is None else make_masks(config, tokenizer)

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
        assert self._masks is not None, "masks need a tokenizer"
        batch = collate_examples(sequences, sequence_ids, pad=pad, length=length, multiple=multiple)
        inputs, labels, total = batch.inputs.numpy(), batch.labels.numpy(), 0
        use, where = (TRAINING, positions) if positions is not None else (EVALUATION, sequence_ids)
        for line, (index, at) in enumerate(zip(sequence_ids.tolist(), where.tolist(), strict=True)):
            tokens, flags = sequences[index]
            seen, chosen = self._masks.draw(tokens[:-1], eligible_tokens(flags), at, use)
            inputs[line, : len(seen)] = seen
            labels[line, chosen] = tokens[chosen]
            total += len(chosen)
        batch.loss_tokens = total
        return batch

    def weight(self, sequences: Sequences, sequence_ids: np.ndarray) -> int:
        return total_masked(sequences.loss_tokens(sequence_ids), self.ratio)

    def module(
        self,
        model: Any,
        anatomy: Anatomy,
        loss: str,
        measure: Measure | None = None,
        *,
        skips_tiles: bool = False,
        matmul_dtype: torch.dtype | None = None,
    ) -> EncoderModel:
        return MaskedModel(model, anatomy, loss, measure, matmul_dtype=matmul_dtype)

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        weight = max(sums["weight"], 1.0)
        loss = sums["loss"] / weight
        perplexity = math.exp(min(loss, LARGEST_EXPONENT)) if math.isfinite(loss) else math.nan
        return {"loss": loss, "perplexity": perplexity, "masked_accuracy": sums["correct"] / weight}


class MaskedModel(EncoderModel):
    """An encoder with the cross-entropy of the masked tokens. The others are left out of the head."""

    def forward(self, batch: Batch) -> LossSums:
        inputs = {"input_ids": batch.inputs, **self.model_kwargs(batch)}
        head = HEADS.get(self.model.config.get_text_config().model_type)
        if head is None:
            return self.losses_of_logits(self.logits(inputs), batch)
        hidden, labels = self.hidden(inputs).flatten(0, 1), batch.labels.flatten()
        kept = kept_tokens(labels, batch.loss_tokens)
        if kept is not None:
            hidden, labels = hidden.index_select(0, kept), labels.index_select(0, kept)
        with self._autocast(hidden.device):
            for name in head:
                hidden = self.model.get_submodule(name)(hidden)
        return self._sums(hidden, labels)

    def losses_of_logits(self, logits: Tensor, batch: Batch) -> LossSums:
        return self._sums(logits.flatten(0, 1), batch.labels.flatten())

    def _sums(self, logits: Tensor, labels: Tensor) -> LossSums:
        loss = self.head_and_loss.loss_of_logits(logits[None], labels[None])
        counted = labels != IGNORED
        correct = ((logits.detach().argmax(-1) == labels) & counted).sum()
        return LossSums(loss, (loss.detach(), counted.sum(), correct))
