"""What the objectives of encoders have in common: whole examples as inputs, and a mask where some are padded."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.data.loader import IGNORED, MicroBatch
from shoal.data.sequences import Sequences
from shoal.models.attention import added_to_scores
from shoal.models.loss import LanguageModel, LossSums
from shoal.models.loss import MicroBatch as Batch


def collate_examples(
    sequences: Sequences, sequence_ids: np.ndarray, *, pad: int, length: int | None = None, multiple: int = 1
) -> MicroBatch:
    """One example per sequence, as inputs without labels. The last stored token of a sequence is not one of them."""
    found = [sequences[int(index)][0][:-1] for index in sequence_ids]
    longest = max(len(tokens) for tokens in found)
    shape = (len(found), -(-longest // multiple) * multiple if length is None else length)
    inputs = np.full(shape, pad, dtype=np.int64)
    values = np.zeros(shape, dtype=np.int64)
    present = np.zeros(shape, dtype=bool)
    has_values = False
    for line, (tokens, index) in enumerate(zip(found, sequence_ids.tolist(), strict=True)):
        inputs[line, : len(tokens)] = tokens
        present[line, : len(tokens)] = True
        if (given := sequences.values(int(index))) is not None:
            has_values = True
            values[line, : len(tokens)] = given[: len(tokens)]
    return MicroBatch(
        torch.from_numpy(inputs),
        torch.full(shape, IGNORED, dtype=torch.int64),
        # Without padding attention needs no mask, and has faster kernels.
        mask=None if present.all() else torch.from_numpy(present[:, None, None]),
        values=torch.from_numpy(values) if has_values else None,
    )


class EncoderModel(LanguageModel):
    """A bidirectional encoder. A class derived from it has the loss, from hidden states or from logits."""

    def model_kwargs(self, batch: Batch) -> dict[str, Any]:
        """The attention mask, if there is padding, and the values of the tokens, if they have some."""
        settings = self.model.config.get_text_config()
        found: dict[str, Any] = {}
        if batch.mask is not None:
            mask = batch.mask
            if getattr(settings, "layer_types", None) is not None:
                found["attention_mask"] = mask[:, 0, 0]  # the model makes a mask for each kind of layers from it
            elif settings._attn_implementation == "eager":
                found["attention_mask"] = added_to_scores(mask)
            else:
                found["attention_mask"] = mask
        if batch.values is not None:
            found["token_type_ids"] = batch.values
        return found

    def losses(self, hidden: Tensor, batch: Batch) -> LossSums:
        raise AssertionError("an encoder has no pipeline stages, which alone start from hidden states")
