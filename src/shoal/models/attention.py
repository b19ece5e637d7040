"""The attention implementation of a transformers model, and the mask of packed sequences.

transformers derives its masks from position_ids, which on CUDA synchronizes the host with the device in every forward
pass. Sequences here are either one document (causal attention needs no mask, and padding is on the right, where no real
token attends to it) or carry document ids, from which the mask is made. So the derivation is skipped: `shoal` is
transformers' own SDPA attention, flex attention where the mask is a BlockMask, or a kernel with a sliding window,
registered under a name for which transformers has no mask function. Only for model types that are tested with it
(`catalogue.causal_models`): some compute a mask of their own from the one that they are given.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from shoal.catalogue.attention import Attention, Heads, choose_attention_path, is_maskless
from shoal.catalogue.families import ATTENTION_DROPOUT
from shoal.models.attention_kernels import (
    attend_in_window,
    attend_to_repeated,
    causal_mask,
    compute_capability,
    compute_dtype,
    must_repeat_keys,
)
from shoal.models.flex import document_blocks, flex_attend, window_blocks

MASKLESS = "shoal"
Mask = Tensor | BlockMask
Masks = Mask | dict[str, Mask | None]  # one for all layers, or one for each kind of layers
SLIDING = "sliding_attention"  # in `layer_types`


def choose_attention(model: Any, wanted: str, longest: int) -> str:
    """The name of the attention implementation for `model`, given the config's `model.attention`."""
    if wanted == "eager":
        return "eager"
    if not getattr(model, "_supports_sdpa", False):
        return "eager"
    settings = model.config.get_text_config()
    maskless = is_maskless(settings.model_type, windowed=window_within(settings, longest) is not None)
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


def attention_of(
    model: Any,
    wanted: str,
    *,
    longest: int,
    itemsize: int,
    device: torch.device,
    compiled: bool,
    documents: bool,
    sharded: bool = False,
) -> Attention:
    """How attention is computed in training: see `choose_attention_path`. `itemsize`: of the dtype of matmuls."""
    settings = model.config.get_text_config()
    heads, keys = (getattr(settings, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    return choose_attention_path(
        _heads(settings, itemsize, device),
        settings.model_type,
        cpu=device.type == "cpu",
        grouped=bool(heads and keys) and keys != heads,
        compiled=compiled and wanted in ("auto", "flex"),
        eager=wanted == "eager",
        windowed=window_within(settings, longest) is not None,
        documents=documents,
        sharded=sharded,
    )


def skips_tiles(model: Any, wanted: str, *, compiled: bool) -> bool:
    """Whether packed sequences use flex attention, which skips fully masked tiles. Uncompiled, it would materialize the
    scores of every pair of tokens."""
    settings = model.config.get_text_config()
    if wanted not in ("auto", "flex") or not compiled or settings._attn_implementation != MASKLESS:
        return False
    return _heads(settings).flex


def _heads(settings: Any, itemsize: int = 2, device: torch.device | None = None) -> Heads:
    width = _head_dim(settings) if getattr(settings, "num_attention_heads", None) else settings.hidden_size
    return Heads(
        itemsize,
        width,
        getattr(settings, "v_head_dim", None) or width,
        any(getattr(settings, name, 0.0) for name in ATTENTION_DROPOUT),
        None if device is None else compute_capability(device.type),
    )


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
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function, with the signature that transformers expects. A mask contains the sliding window."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    dtype = compute_dtype(value)  # in mixed precision rotary embeddings are applied in fp32
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if isinstance(attention_mask, BlockMask):
        found = flex_attend(query, key, value, attention_mask, scaling)
    elif attention_mask is None and sliding_window is not None and sliding_window < query.shape[2]:
        found = attend_in_window(query, key, value, sliding_window, scaling, dropout)
    elif attention_mask is None and must_repeat_keys(query, key, value):
        causal = others.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        found = attend_to_repeated(query, key, value, scaling, dropout, causal=causal)
    else:
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **others
        )
        return result
    return found.transpose(1, 2).contiguous(), None


def window_masks(settings: Any, window: int, length: int, device: torch.device) -> Masks:
    """The masks of sequences that are one document, for flex attention in the layers with a sliding window. Layers of
    other kinds need none."""
    sliding = window_blocks(length, window, device)
    kinds = getattr(settings, "layer_types", None)
    if kinds is None:  # every layer has the window
        return sliding
    return {kind: sliding if kind == SLIDING else None for kind in dict.fromkeys(kinds)}


def packed_mask(settings: Any, documents: Tensor, *, tiles: bool = False) -> Masks:
    """The mask of packed sequences, within the sliding window of a layer: dense, or `tiles` for flex attention. A model
    with layers of several kinds takes one mask for each kind."""
    window = window_within(settings, documents.shape[1])
    make = document_blocks if tiles else document_mask
    kinds = getattr(settings, "layer_types", None)
    if window is None or kinds is None:  # every layer has the window
        return make(documents, window)
    full, sliding = make(documents, None), make(documents, window)
    return {kind: sliding if kind == SLIDING else full for kind in dict.fromkeys(kinds)}


def document_mask(documents: Tensor, window: int | None = None) -> Tensor:
    """[batch, 1, query, key]: true where both tokens are in one document and the key is not later than the query, nor
    `window` tokens earlier."""
    same = documents[:, :, None] == documents[:, None, :]
    return (same & causal_mask(documents.shape[1], window, documents.device))[:, None]


def added_to_scores(mask: Mask) -> Tensor:
    """`mask` for eager attention, which adds it to the scores."""
    assert not isinstance(mask, BlockMask), "flex attention is not eager"
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
