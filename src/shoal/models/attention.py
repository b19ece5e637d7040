"""The attention implementation of a transformers model, and the mask of packed sequences.

transformers derives its masks from position_ids, which on CUDA synchronizes the host with the device in every forward
pass. Sequences here are either one document (causal attention needs no mask, and padding is on the right, where no real
token attends to it) or carry document ids, from which the mask is made. So the derivation is skipped: `shoal` is
transformers' own SDPA attention, or flex attention where the mask is a BlockMask, registered under a name for which
transformers has no mask function. Only for model types that are tested with it (`catalogue.causal_models`): some
compute a mask of their own from the one that they are given.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from shoal.catalogue.causal_models import MASKED, PACKED
from shoal.catalogue.families import ATTENTION_DROPOUT
from shoal.models.flex import flex_attend

MASKLESS = "shoal"
# The smallest head dimension that its CUDA kernels support.
NARROWEST = 16
SLIDING = "sliding_attention"  # in `layer_types`


def choose_attention(model: Any, wanted: str, longest: int) -> str:
    """The name of the attention implementation for `model`, given the config's `model.attention`."""
    if wanted == "eager":
        return "eager"
    if not getattr(model, "_supports_sdpa", False):
        return "eager"
    settings = model.config.get_text_config()
    maskless = settings.model_type in PACKED - MASKED and window_within(settings, longest) is None
    if not maskless or not getattr(model, "_supports_attention_backend", False):
        return "sdpa"
    _register()
    return MASKLESS


def window_within(settings: Any, length: int) -> int | None:
    """The sliding window of some or all layers, if it is shorter than `length`."""
    window = getattr(settings, "sliding_window", None)
    kinds = getattr(settings, "layer_types", None)
    if not window or window >= length or (kinds is not None and SLIDING not in kinds):
        return None
    return int(window)


def skips_tiles(model: Any, wanted: str, *, compiled: bool) -> bool:
    """Whether packed sequences use flex attention, which skips fully masked tiles. Uncompiled, it would materialize the
    scores of every pair of tokens."""
    settings = model.config.get_text_config()
    if wanted not in ("auto", "flex") or not compiled or settings._attn_implementation != MASKLESS:
        return False
    drops = any(getattr(settings, name, 0.0) for name in ATTENTION_DROPOUT)  # flex attention does not support it
    return not drops and _narrowest_head(settings) >= NARROWEST


def attention_width(settings: Any) -> int:
    """Heads × head dimension, which not every model has as its hidden size. Recurrent models have no heads."""
    heads = getattr(settings, "num_attention_heads", None)
    width: int = heads * _head_dim(settings) if isinstance(heads, int) and heads else settings.hidden_size
    return width


def _head_dim(settings: Any) -> int:
    try:
        width: int | None = getattr(settings, "head_dim", None)
    except Exception:  # Gemma 4's differs between layers, and transformers raises an error of its own
        width = None
    return width or int(settings.hidden_size // settings.num_attention_heads)


def _narrowest_head(settings: Any) -> int:
    width = _head_dim(settings)
    return min(width, getattr(settings, "v_head_dim", None) or width)


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(MASKLESS, attend)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | BlockMask | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function, with the signature that transformers expects."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    query, key = query.to(value.dtype), key.to(value.dtype)  # in mixed precision rotary embeddings are applied in fp32
    if isinstance(attention_mask, BlockMask):
        return flex_attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None
    result: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **others
    )
    return result


def packed_mask(settings: Any, documents: Tensor) -> Tensor | dict[str, Tensor]:
    """The mask of packed sequences: `document_mask`, within the sliding window of a layer. A model with layers of
    several kinds takes one mask for each kind."""
    mask = document_mask(documents)
    window = window_within(settings, documents.shape[1])
    if window is None:
        return mask
    index = torch.arange(documents.shape[1], device=documents.device)
    sliding = mask & (index[:, None] - index[None, :] < window)
    kinds = getattr(settings, "layer_types", None)
    if kinds is None:  # every layer has the window
        return sliding
    return {kind: sliding if kind == SLIDING else mask for kind in dict.fromkeys(kinds)}


def document_mask(documents: Tensor) -> Tensor:
    """[batch, 1, query, key]: true where both tokens are in one document and the key is not later than the query."""
    length = documents.shape[1]
    same = documents[:, :, None] == documents[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return (same & causal)[:, None]


def added_to_scores(mask: Tensor) -> Tensor:
    """`mask` for eager attention, which adds it to the scores."""
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
