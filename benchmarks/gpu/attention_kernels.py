"""Shapes of attention, and the kernels of torch and of shoal for each: what attention.py times."""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

TINY = "--tiny" in sys.argv
DEVICE = torch.device("cpu" if TINY else "cuda")
BF16, FP32 = torch.bfloat16, torch.float32
DOCUMENTS = 8  # per packed sequence
MOST_DOCUMENTS = 256  # of all sequences, in the list of bounds: the others are empty

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Shape:
    """Queries, keys and values of one model's layer."""

    name: str
    sequences: int
    length: int
    heads: int
    kv_heads: int
    head: int
    dtype: torch.dtype = BF16
    window: int | None = None
    dropout: float = 0.0
    packed: bool = False

    @property
    def small(self) -> "Shape":
        window = None if self.window is None else 40
        return Shape(self.name, 2, 96, 4, 2, 16, FP32, window, self.dropout, self.packed)


SHAPES = [
    Shape("mistral-7b 1x8192 window", 1, 8192, 32, 8, 128, window=4096),
    Shape("gpt2 32x1024", 32, 1024, 12, 12, 64),
    Shape("gpt2 32x1024 dropout", 32, 1024, 12, 12, 64, dropout=0.1),
    Shape("llama3.2-1b 4x4096", 4, 4096, 32, 8, 64),
    Shape("llama3.2-1b 4x4096 packed", 4, 4096, 32, 8, 64, packed=True),
    Shape("llama3.2-1b 2x4096 fp32", 2, 4096, 32, 8, 64, dtype=FP32),
    Shape("gemma 2x4096 head 256", 2, 4096, 8, 4, 256),
    Shape("gemma 2x4096 head 256 window", 2, 4096, 8, 4, 256, window=1024),
    Shape("gemma 1x4096 head 256 fp32", 1, 4096, 8, 4, 256, dtype=FP32),
    Shape("mistral-7b 1x8192 window fp32", 1, 8192, 32, 8, 128, dtype=FP32, window=4096),
]


def tensors(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """As a model makes them: [batch, heads, length, head], a view of [batch, length, heads, head]."""
    torch.manual_seed(0)
    found = [
        torch.randn(shape.sequences, shape.length, heads, shape.head, device=DEVICE).to(shape.dtype).transpose(1, 2)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    return tuple(one.requires_grad_() for one in found)  # type: ignore[return-value]


def documents_of(shape: Shape) -> Tensor:
    each = -(-shape.length // DOCUMENTS)
    return (torch.arange(shape.length, device=DEVICE) // each).expand(shape.sequences, -1).contiguous()


def dense_mask(shape: Shape) -> Tensor:
    index = torch.arange(shape.length, device=DEVICE)
    mask = index[:, None] >= index[None, :]
    if shape.window is not None:
        mask = mask & (index[:, None] - index[None, :] < shape.window)
    if shape.packed:
        ids = documents_of(shape)
        return (ids[:, :, None] == ids[:, None, :])[:, None] & mask
    return mask[None, None]


def blocks_of(shape: Shape) -> BlockMask:
    ids, window = documents_of(shape), shape.window

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        found = query >= key
        if window is not None:
            found = found & (query - key < window)
        if shape.packed:
            found = found & (ids[batch, query] == ids[batch, key])
        return found

    batch = shape.sequences if shape.packed else None
    return create_block_mask(seen, batch, None, shape.length, shape.length, device=DEVICE)


def repeated(shape: Shape, one: Tensor) -> Tensor:
    times = shape.heads // shape.kv_heads
    batch, heads, length, head = one.shape
    return one[:, :, None].expand(batch, heads, times, length, head).reshape(batch, heads * times, length, head)


def sdpa(shape: Shape, backend: SDPBackend | None, *, repeat: bool = False, mask: bool = False) -> Attention:
    """SDPA with one of its kernels, or the one it selects itself. Without a mask it is causal, also if the shape has a
    window: the bound."""
    grid = dense_mask(shape) if mask else None

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if repeat:
            key, value = repeated(shape, key), repeated(shape, value)
        here: AbstractContextManager[Any] = nullcontext() if backend is None else sdpa_kernel(backend)
        with here:
            return F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=grid,
                dropout_p=shape.dropout,
                is_causal=grid is None,
                enable_gqa=query.shape[1] != key.shape[1],
            )

    return attend


def flash(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """FlashAttention 2 as torch has it, with its window."""
    left = None if shape.window is None else shape.window - 1
    found = torch.ops.aten._flash_attention_forward(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        None,
        None,
        query.shape[2],
        key.shape[2],
        shape.dropout,
        True,
        False,
        window_size_left=left,
        window_size_right=None if left is None else 0,
    )
    return found[0].transpose(1, 2)


def compiled_flash(shape: Shape) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return flash(shape, query, key, value)

    return torch.compile(attend, dynamic=False, fullgraph=True)


def flash_documents(shape: Shape) -> Attention:
    """The same over all documents of all sequences, with a list of bounds of fixed length."""
    total = shape.sequences * shape.length
    ids = documents_of(shape) + DOCUMENTS * torch.arange(shape.sequences, device=DEVICE)[:, None]
    bounds = torch.searchsorted(ids.flatten(), torch.arange(MOST_DOCUMENTS + 1, device=DEVICE)).int()

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        left = -1 if shape.window is None else shape.window - 1
        found = torch.ops.aten._flash_attention_forward(
            *(one.transpose(1, 2).reshape(total, one.shape[1], one.shape[3]) for one in (query, key, value)),
            bounds,
            bounds,
            shape.length,
            shape.length,
            shape.dropout,
            True,
            False,
            window_size_left=left,
            window_size_right=-1 if shape.window is None else 0,
        )
        return found[0].view(shape.sequences, shape.length, shape.heads, shape.head).transpose(1, 2)

    return attend


def efficient(shape: Shape, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The memory-efficient kernel, which has a window too, and supports fp32."""
    query, key, value = (one.transpose(1, 2) for one in (query, repeated(shape, key), repeated(shape, value)))
    found = torch.ops.aten._efficient_attention_forward(
        query,
        key,
        value,
        None,
        None,
        None,
        None,
        None,
        shape.dropout,
        1,  # causal
        True,
        window_size=shape.window,
    )
    return found[0].transpose(1, 2)


def flex(shape: Shape, **options: Any) -> Attention:
    blocks = blocks_of(shape)
    here = flex_attention if TINY else torch.compile(flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        gqa = query.shape[1] != key.shape[1]
        found: Tensor = here(  # type: ignore[assignment]
            query, key, value, block_mask=blocks, enable_gqa=gqa, kernel_options=options or None
        )
        return found

    return attend


def trained(shape: Shape, *, compiled: bool) -> Attention:
    """What shoal trains with."""
    from shoal.catalogue.attention import Heads
    from shoal.models.attention import attend, packed_mask, window_masks

    class Layer(torch.nn.Module):
        is_causal, num_key_value_groups = True, shape.heads // shape.kv_heads

    layer, settings = Layer(), SimpleNamespace(sliding_window=shape.window)
    mask = packed_mask(settings, documents_of(shape), tiles=compiled) if shape.packed else None
    if shape.window and compiled and Heads(shape.dtype.itemsize, shape.head, shape.head, shape.dropout > 0).flex_window:
        mask = window_masks(settings, shape.window, shape.length, DEVICE)

    def here(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found = attend(layer, query, key, value, mask, dropout=shape.dropout, sliding_window=shape.window)
        return found[0].transpose(1, 2)

    return torch.compile(here, dynamic=False, fullgraph=True) if compiled else here


def activated(name: str) -> Attention:
    """FlashAttention 3 or 4 in place of 2, where they are installed."""
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl(name)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return attend


def restored() -> None:
    from torch.nn.attention import current_flash_attention_impl, restore_flash_attention_impl

    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


def candidates(shape: Shape) -> Iterator[tuple[str, Callable[[], Attention]]]:
    """The kernels for a shape, each made when its turn comes: some cannot even be made."""
    grouped, wide = shape.heads != shape.kv_heads, shape.dtype == FP32
    yield "shoal", lambda: trained(shape, compiled=False)
    yield "shoal, compiled", lambda: trained(shape, compiled=True)
    masked = shape.window is not None or shape.packed
    if wide:
        yield (
            "efficient, repeated keys",
            lambda: sdpa(shape, SDPBackend.EFFICIENT_ATTENTION, repeat=grouped, mask=masked),
        )
        yield "efficient with window", lambda: partial(efficient, shape)
        if not masked:
            yield "what SDPA selects", lambda: sdpa(shape, None)
        if not shape.window:
            yield "flex", lambda: flex(shape)
        return
    yield "cuDNN, causal", lambda: sdpa(shape, SDPBackend.CUDNN_ATTENTION)
    yield "flash, causal", lambda: sdpa(shape, SDPBackend.FLASH_ATTENTION)
    if masked or shape.dropout:
        repeat = partial(sdpa, shape, SDPBackend.EFFICIENT_ATTENTION, repeat=grouped, mask=masked)
        yield "efficient, dense mask" if masked else "efficient", repeat
    if masked:
        yield "cuDNN, dense mask", lambda: sdpa(shape, SDPBackend.CUDNN_ATTENTION, mask=True)
    if shape.packed:
        yield "flash over documents", lambda: flash_documents(shape)
    else:
        yield "flash operator", lambda: partial(flash, shape)
        yield "flash operator, compiled", lambda: compiled_flash(shape)
    if shape.window:
        yield "efficient with window", lambda: partial(efficient, shape)
    if not shape.dropout:
        yield "flex", lambda: flex(shape)
        yield "flex, FLASH backend", lambda: flex(shape, BACKEND="FLASH")
    if shape.head == 64 and grouped and not shape.packed:
        yield "flex, tiles of 128 × 64", lambda: flex(shape, fwd_BLOCK_M=128, fwd_BLOCK_N=64, fwd_num_warps=8)
        yield "FlashAttention 3", lambda: activated("FA3")
        yield "FlashAttention 4", lambda: activated("FA4")
