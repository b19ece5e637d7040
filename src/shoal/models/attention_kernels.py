"""Attention through the kernels of torch that store no scores, where SDPA would not select them by itself.

With fewer heads of keys than of queries, SDPA materializes the scores unless flash attention or cuDNN runs: in fp32,
and on older GPUs. Keys and values are repeated there, for the memory-efficient kernel. SDPA has no sliding window
either, but flash attention does; elsewhere each part of the queries attends to the keys within its reach alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.catalogue.attention import Heads

HEADS, SEQUENCE = 1, 2  # of queries, keys and values
# The memory-efficient kernel's name for it (CausalFromBottomRight in PyTorch).
CAUSAL_FROM_END = 2
# Queries per band of a sliding window: enough for a kernel to be busy, and not so many bands that each costs time.
SHORTEST_BAND, MOST_BANDS = 512, 16


def compute_capability(device: str) -> tuple[int, int] | None:
    """Of the current device of this type; None if it is not an NVIDIA GPU."""
    return None if device != "cuda" or torch.version.hip is not None else torch.cuda.get_device_capability()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def runs(kernel: str, device: str, itemsize: int, width: int, value_width: int) -> bool:
    """Whether a kernel of `Heads` runs on the current device, whatever the dropout; the compiler evaluates it once."""
    heads = Heads(itemsize, width, value_width, dropout=True, capability=compute_capability(device))
    return bool(getattr(heads, kernel))


def compute_dtype(value: Tensor) -> torch.dtype:
    """The dtype in which attention is computed. Operators other than SDPA are not autocast."""
    device = value.device.type
    autocast = device != "meta" and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else value.dtype


def must_repeat_keys(query: Tensor, key: Tensor, value: Tensor, *, masked: bool = False) -> bool:
    """Whether SDPA, with a dense mask or without, would materialize the scores because there are fewer heads of keys
    than of queries."""
    if query.shape[HEADS] == key.shape[HEADS]:
        return False
    return _runs("efficient", query, value) and (masked or not _runs("flash", query, value))


def attend_to_repeated(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, *, causal: bool
) -> Tensor:
    """SDPA without a mask, with keys and values repeated for every head of the queries."""
    times = query.shape[HEADS] // key.shape[HEADS]
    return F.scaled_dot_product_attention(
        query,
        repeat_heads(key, times),
        repeat_heads(value, times),
        dropout_p=dropout,
        is_causal=causal,
        scale=scale,
    )


def attend_in_window(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, dropout: float
) -> Tensor:
    """Causal attention to the last `window` tokens, of which the query's own is one."""
    if _runs("flash_window", query, value):
        return _flash(query, key, value, scale, dropout, window)
    times = query.shape[HEADS] // key.shape[HEADS]
    return _attend_in_bands(query, repeat_heads(key, times), repeat_heads(value, times), window, scale, dropout)


def attends_from_end(query: Tensor, value: Tensor) -> bool:
    """Whether `attend_from_end` runs: the compiler of torch 2.11 fails with the backward pass of its second kernel."""
    efficient = _runs("efficient", query, value) and not torch.compiler.is_compiling()
    return efficient or _runs("flash_window", query, value)


def attend_from_end(query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float) -> Tensor:
    """Causal attention of queries that belong to the last tokens of `key`. SDPA's `is_causal` takes them for the first
    ones, its kernels for the last. It has a mask for that too (`causal_lower_right`), which is a subclass of tensors,
    with which that compiler fails as well."""
    if _runs("flash_window", query, value):
        return _flash(query, key, value, scale, dropout)
    times = query.shape[HEADS] // key.shape[HEADS]
    key, value = repeat_heads(key, times), repeat_heads(value, times)
    found: Tensor = torch.ops.aten._efficient_attention_forward(
        *(one.transpose(HEADS, SEQUENCE) for one in (query, key, value)),
        None,
        None,
        None,
        None,
        None,
        dropout,
        CAUSAL_FROM_END,
        compute_log_sumexp=True,
        scale=scale,
    )[0]
    return found.transpose(HEADS, SEQUENCE)


def repeat_heads(one: Tensor, times: int) -> Tensor:
    """Each head `times` times, in consecutive order."""
    if times == 1:
        return one
    batch, heads, length, width = one.shape
    return one[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    """[query, key]: true where the key is not later than the query, nor `window` tokens earlier."""
    return _seen(torch.arange(length, device=device), torch.arange(length, device=device), window)


def _seen(queries: Tensor, keys: Tensor, window: int | None) -> Tensor:
    distance = queries[:, None] - keys[None, :]
    mask = distance >= 0
    return mask if window is None else mask & (distance < window)


def _runs(kernel: str, query: Tensor, value: Tensor) -> bool:
    return bool(runs(kernel, query.device.type, query.element_size(), query.shape[-1], value.shape[-1]))


def _flash(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, window: int | None = None
) -> Tensor:
    """Flash attention, which supports fewer heads of keys. Its window has no length, but a reach to either side."""
    reach = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
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
        **reach,
    )[0]
    return found.transpose(HEADS, SEQUENCE)


def _attend_in_bands(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, dropout: float
) -> Tensor:
    """SDPA of consecutive queries with the keys that any of them attends to: the masks of all bands together have an
    element for each token and each key within its reach, instead of for each pair of tokens."""
    length, found = query.shape[SEQUENCE], []
    band = max(SHORTEST_BAND, window // 4, -(-length // MOST_BANDS))
    band += -band % 64  # the kernels like aligned masks
    positions = torch.arange(length, device=query.device)
    for start in range(0, length, band):
        end = min(start + band, length)
        first = max(0, start - window + 1) // 64 * 64
        mask = _seen(positions[start:end], positions[first:end], window)
        part = query[:, :, start:end], key[:, :, first:end], value[:, :, first:end]
        found.append(F.scaled_dot_product_attention(*part, attn_mask=mask, dropout_p=dropout, scale=scale))
    return torch.cat(found, SEQUENCE)
