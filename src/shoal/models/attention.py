"""Which attention code a transformers model calls, and the mask of rows that hold several documents.

transformers derives its masks from position_ids, which on CUDA makes the host wait for the device in every forward.
Rows here are either one document (causal attention needs no mask, and padding stands on the right where no real token
looks) or carry document numbers (the mask is made from those), so the derivation is skipped: `shoal` is transformers'
own SDPA attention, registered under a name for which no mask maker is registered.
"""

from typing import Any

import torch
from torch import Tensor

MASKLESS = "shoal"


def choose_attention(model: Any, wanted: str, longest: int) -> str:
    """The name of the attention implementation for `model`, given the config's `model.attention`."""
    if wanted == "eager":
        return "eager"
    if not getattr(model, "_supports_sdpa", False):
        return "eager"
    window = getattr(model.config.get_text_config(), "sliding_window", None)
    windowed = window is not None and window < longest
    if windowed or not getattr(model, "_supports_attention_backend", False):
        return "sdpa"
    _register()
    return MASKLESS


def _register() -> None:
    from transformers import AttentionInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(MASKLESS, sdpa_attention_forward)


def masks_itself(settings: Any) -> bool:
    """Whether the model finds the borders of packed documents by itself, from positions that start anew.

    Only where it must: a sliding window is part of its mask too. Not every model looks (BERT's eager code does not).
    """
    maskless = settings._attn_implementation.startswith(MASKLESS)
    return not maskless and getattr(settings, "sliding_window", None) is not None


def document_mask(documents: Tensor) -> Tensor:
    """[batch, 1, query, key]: true where both are of one document and the key is not later than the query."""
    length = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (same & causal)[:, None]
