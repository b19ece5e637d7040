"""Attention through the kernels of torch that store no scores, where SDPA would not select them by itself.

With fewer heads of keys than of queries, SDPA materializes the scores unless flash attention or cuDNN runs: in fp32,
and on older GPUs. Keys and values are repeated there, for the memory-efficient kernel. SDPA has no sliding window
either, while flash attention and the memory-efficient kernel do; both operators have gradients and can be compiled.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.catalogue.attention import Heads

HEADS, SEQUENCE = 1, 2  # of queries, keys and values
CAUSAL = 1  # as a `custom_mask_type` of the memory-efficient kernel


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def compute_capability(device: str) -> tuple[int, int] | None:
    """Of the current device of this type; None if it is not an NVIDIA GPU."""
    return None if device != "cuda" or torch.version.hip is not None else torch.cuda.get_device_capability()


def compute_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which attention is computed. Operators other than SDPA are not autocast."""
    device = value.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else value.dtype


def must_repeat_keys(query: Tensor, key: Tensor, value: Tensor, dropout: float, *, masked: bool = False) -> bool:
    """Whether SDPA, with a dense mask or without, would materialize the scores because there are fewer heads of keys
    than of queries."""
    if query.shape[HEADS] == key.shape[HEADS]:
        return False
    heads = _heads(query, value, dropout)
    return heads.efficient and (masked or not heads.flash)


def attend_to_repeated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
    dropout: float,
    causal: bool = True,
) -> Tensor:
    """SDPA with keys and values repeated for every head of the queries. Without a mask it is causal, if `causal`."""
    times = query.shape[HEADS] // key.shape[HEADS]
    return F.scaled_dot_product_attention(
        query,
        repeat_heads(key, times),
        repeat_heads(value, times),
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal and mask is None,
        scale=scale,
    )


def attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, dropout: float
) -> Tensor:
    """Causal attention to the last `window` tokens, of which the query's own is one."""
    kernel = _heads(query, value, dropout).windows
    if kernel is None:
        mask = causal_mask(query.shape[SEQUENCE], window, query.device)
        return attend_to_repeated(query, key, value, mask, scale, dropout)
    if kernel == "flash":
        return _flash_in_window(query, key, value, window, scale, dropout)
    times = query.shape[HEADS] // key.shape[HEADS]
    return _efficient_in_window(query, repeat_heads(key, times), repeat_heads(value, times), window, scale, dropout)


def repeat_heads(one: Tensor, times: int) -> Tensor:
    """Each head `times` times, in consecutive order."""
    if times == 1:
        return one
    batch, heads, length, width = one.shape
    return one[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[query, key]: true where the key is not later than the query, nor `window` tokens earlier."""
    index = torch.arange(length, device=device)
    distance = index[:, None] - index[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def _heads(query: Tensor, value: Tensor, dropout: float) -> Heads:
    capability = compute_capability(query.device.type)
    return Heads(query.element_size(), query.shape[-1], value.shape[-1], dropout > 0, capability)


def _flash_in_window(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, dropout: float
) -> Tensor:
    """Flash attention, which supports fewer heads of keys. Its window has no length, but a reach to either side."""
    found: Tensor = torch.ops.aten._flash_attention_forward(
        query.transpose(HEADS, SEQUENCE),
        key.transpose(HEADS, SEQUENCE),
        value.transpose(HEADS, SEQUENCE),
        None,
        None,
        query.shape[SEQUENCE],
        key.shape[SEQUENCE],
        dropout,
        True,
        False,
        scale=scale,
        window_size_left=window - 1,
        window_size_right=0,
    )[0]
    return found.transpose(HEADS, SEQUENCE)


def _efficient_in_window(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, dropout: float
) -> Tensor:
    """The memory-efficient kernel. It returns the logarithms of the sums because its backward pass needs them."""
    found: Tensor = torch.ops.aten._efficient_attention_forward(
        query.transpose(HEADS, SEQUENCE),
        key.transpose(HEADS, SEQUENCE),
        value.transpose(HEADS, SEQUENCE),
        None,
        None,
        None,
        None,
        None,
        dropout,
        CAUSAL,
        True,
        scale=scale,
        window_size=window,
    )[0]
    return found.transpose(HEADS, SEQUENCE)
