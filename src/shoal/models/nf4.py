"""Weights in NF4, the 4-bit format of QLoRA, as plain tensors that can be sharded like any other.

A matrix [out, in] is stored in bitsandbytes' layout with blocks of 64 consecutive elements of a row:

- `weight`, uint8 [out, in / 2]: two 4-bit codes per byte, the first in the upper half. A code is an index into VALUES.
- `absmax`, [out, in / 64]: the scale of each block, its absolute maximum. fp32 for nf4. For nf4-dq (double
  quantization) an 8-bit code: an index into `dynamic_values`, whose own blocks are 256 scales of the flattened matrix.
- `nested_absmax` [out * in / 64 / 256] and `nested_offset` [1], fp32, for nf4-dq only: the absolute maximum of each
  block of scales, and the mean of all scales, which is subtracted before they are quantized.

fp32 values are stored bitwise as int32, because the mixed-precision policy of FSDP2 casts floating-point parameters and
leaves integer ones alone.

The kinds bnb.nf4 and bnb.nf4-dq have the same format and are quantized and dequantized by bitsandbytes. The results are
the same, with one exception: on a CPU bitsandbytes rounds a scale to one of 65,536 values before it looks for the
nearest 8-bit code, and may then choose the code next to it. Here it is the nearest on every device.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.mistakes import UserMistake

QUANTIZED = ("nf4", "nf4-dq", "bnb.nf4", "bnb.nf4-dq")
BLOCK = 64
NESTED_BLOCK = 256

# Quantiles of the standard normal distribution, divided by the largest: 8 at or below zero and 9 at or above, with zero
# in both. The outermost probability is the mean of 1 - 1/30 and 1 - 1/32.
VALUES = (
    *(-1.0, -0.6961928, -0.52507305, -0.3949175, -0.28444138, -0.18477343, -0.091050036, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
# Keeps the reciprocal of the scale of an all-zero block finite.
SMALLEST = 1e-38
# Elements that are quantized or, on a CPU, dequantized at a time: this bounds temporary memory, and fits into caches.
CHUNK, CPU_CHUNK = 2**23, 2**18


def is_double(kind: str) -> bool:
    """Whether the scales of this kind are quantized too."""
    return kind.endswith("-dq")


def is_library(kind: str) -> bool:
    """Whether bitsandbytes quantizes and dequantizes this kind."""
    return kind.startswith("bnb.")


def check_library(kind: str) -> None:
    """Refuse a kind of bitsandbytes' if that is not installed."""
    if is_library(kind) and find_spec("bitsandbytes") is None:
        raise UserMistake(
            f"The quantization {kind} needs bitsandbytes, which is not installed: use {kind.removeprefix('bnb.')}, "
            "which has the same format, or run `pip install 'shoal[quantize]'`."
        )


def quantized_shapes(kind: str, shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name → (shape, dtype) of the tensors that store a matrix of this shape."""
    rows, columns = shape
    if columns % BLOCK:
        raise UserMistake(
            f"A weight of shape {rows} × {columns} cannot be quantized to {kind}, because its rows are not a multiple "
            f"of {BLOCK} long: leave it out, or use adapter.kind lora."
        )
    blocks = columns // BLOCK
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "weight": ((rows, columns // 2), torch.uint8),
        "absmax": ((rows, blocks), torch.uint8 if is_double(kind) else torch.int32),
    }
    if is_double(kind):
        shapes["nested_absmax"] = ((ceil(rows * blocks / NESTED_BLOCK),), torch.int32)
        shapes["nested_offset"] = ((1,), torch.int32)
    return shapes


@torch.no_grad()
def quantize(weight: Tensor, kind: str) -> dict[str, Tensor]:
    """The tensors that store `weight` [out, in], on its device.

    Rows are quantized independently, except for the scales of double quantization, whose statistics need all rows.
    """
    check_library(kind)
    quantize_blocks, quantize_scales = _BY_LIBRARY if is_library(kind) else (_quantize_blocks, _quantize_scales)
    rows, columns = weight.shape
    parts = {
        name: torch.empty(shape, dtype=dtype, device=weight.device)
        for name, (shape, dtype) in quantized_shapes(kind, (rows, columns)).items()
    }
    scales = torch.empty(rows, columns // BLOCK, device=weight.device)
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        codes, largest = quantize_blocks(weight[chunk].reshape(-1, BLOCK))
        parts["weight"][chunk], scales[chunk] = codes.view(-1, columns // 2), largest.view(-1, columns // BLOCK)
    if not is_double(kind):
        return parts | {"absmax": scales.view(torch.int32)}
    # In fp32 the last bit of the mean would depend on the number of threads.
    offset = scales.mean() if is_library(kind) else scales.double().mean().float()
    codes, largest = quantize_scales(scales.flatten() - offset)
    nested = {"nested_absmax": largest.view(torch.int32), "nested_offset": offset.view(1).view(torch.int32)}
    return parts | {"absmax": codes.view(scales.shape)} | nested


def _quantize_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The packed codes and the scales of [n, BLOCK] weights."""
    scales = blocks.abs().amax(-1).float()
    codes = _nearest(blocks.float(), scales, _values(blocks.device)).view(-1, 2)
    return (codes[:, 0] << 4) | codes[:, 1], scales


def _quantize_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """The 8-bit codes of [n] scales, whose mean is zero, and the scales of their blocks."""
    blocks = F.pad(scales, (0, -len(scales) % NESTED_BLOCK)).view(-1, NESTED_BLOCK)
    largest = blocks.abs().amax(-1)
    codes = _nearest(blocks, largest, dynamic_values(scales.device)).flatten()
    return codes[: len(scales)].clone(), largest


def _nearest(blocks: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """The index of the entry of the sorted `table` that is nearest to a value divided by its block's scale."""
    shares = blocks * (1.0 / scales.clamp_min(SMALLEST)).unsqueeze(-1)
    return torch.bucketize(shares, (table[:-1] + table[1:]) / 2, out_int32=True).to(torch.uint8)


@cache
def _values(device: torch.device) -> Tensor:
    return torch.tensor(VALUES, device=device)


@cache
def dynamic_values(device: torch.device) -> Tensor:
    """The 256 values of the signed dynamic 8-bit data type (Dettmers, 2015), sorted.

    Each decade from 1e-6 to 1 has twice as many values as the one below it: the centers of equal intervals of it. There
    are a zero and a one too, but no -1.
    """
    decades = []
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2**decade + 1, device="cpu")
        centers = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - 6)
        decades += [centers, -centers]
    return torch.cat([*decades, torch.tensor([0.0, 1.0], device="cpu")]).sort().values.to(device)


def dequantize(parts: Mapping[str, Tensor], dtype: torch.dtype, kind: str) -> Tensor:
    """The matrix [out, in] that is stored in `parts`, in `dtype`."""
    result: Tensor = dequantize_nf4(*tensors_of(parts), dtype, is_library(kind))
    return result


def tensors_of(parts: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """In the order in which operators take them."""
    return parts["weight"], parts["absmax"], parts.get("nested_absmax"), parts.get("nested_offset")


@torch.library.custom_op("shoal::dequantize_nf4", mutates_args=())
def dequantize_nf4(
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    dtype: torch.dtype,
    by_library: bool,
) -> Tensor:
    """The dequantized matrix."""
    if by_library:
        return _dequantize_by_library(weight, absmax, nested_absmax, nested_offset, dtype)
    if weight.is_cuda:
        from shoal.models.nf4_kernel import dequantize_kernel

        tables = _values(weight.device), dynamic_values(weight.device)
        return dequantize_kernel(weight, absmax, nested_absmax, nested_offset, dtype, *tables, NESTED_BLOCK)
    scales = _scales(absmax, nested_absmax, nested_offset)
    rows, columns = weight.shape[0], weight.shape[1] * 2
    result = torch.empty(rows, columns // BLOCK, BLOCK, dtype=dtype, device=weight.device)
    step = max(1, CPU_CHUNK // columns)
    for start in range(0, rows, step):
        chunk = slice(start, start + step)
        pairs = _pairs().index_select(0, weight[chunk].flatten().int()).view(torch.float32)
        torch.mul(pairs.view(-1, columns // BLOCK, BLOCK), scales[chunk].unsqueeze(-1), out=result[chunk])
    return result.view(rows, columns)


@dequantize_nf4.register_fake
def _(
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    dtype: torch.dtype,
    by_library: bool,
) -> Tensor:
    return weight.new_empty((weight.shape[0], weight.shape[1] * 2), dtype=dtype)


@cache
def _pairs() -> Tensor:
    """The two values of each byte, as one element of 64 bits, so that a lookup moves both."""
    table = _values(torch.device("cpu"))
    pairs = torch.stack([table.repeat_interleave(16), table.repeat(16)], 1)
    return pairs.view(torch.float64).flatten()


def _scales(absmax: Tensor, nested_absmax: Tensor | None, nested_offset: Tensor | None) -> Tensor:
    """The fp32 scale of each block, for a CPU."""
    if nested_absmax is None:
        return absmax.view(torch.float32)
    assert nested_offset is not None
    scales = dynamic_values(absmax.device).index_select(0, absmax.flatten().int())
    per_scale = nested_absmax.view(torch.float32).repeat_interleave(NESTED_BLOCK)[: scales.numel()]
    return scales.mul_(per_scale).add_(nested_offset.view(torch.float32)).view(absmax.shape)


def _library() -> Any:
    """The operators of bitsandbytes, which its import registers."""
    import bitsandbytes  # noqa: F401

    return torch.ops.bitsandbytes


def _quantize_blocks_by_library(blocks: Tensor) -> tuple[Tensor, Tensor]:
    codes, scales = _library().quantize_4bit(blocks, BLOCK, "nf4", torch.uint8)
    return codes, scales


def _quantize_scales_by_library(scales: Tensor) -> tuple[Tensor, Tensor]:
    codes, largest = _library().quantize_blockwise(scales, dynamic_values(scales.device), NESTED_BLOCK)
    return codes, largest


_BY_LIBRARY = (_quantize_blocks_by_library, _quantize_scales_by_library)


def _dequantize_by_library(
    weight: Tensor, absmax: Tensor, nested_absmax: Tensor | None, nested_offset: Tensor | None, dtype: torch.dtype
) -> Tensor:
    if nested_absmax is None:
        scales = absmax.view(torch.float32)
    else:
        assert nested_offset is not None
        nested, table = nested_absmax.view(torch.float32), dynamic_values(absmax.device)
        scales = _library().dequantize_blockwise(absmax, nested, table, NESTED_BLOCK, torch.float32)
        scales += nested_offset.view(torch.float32)
    shape = (weight.shape[0], weight.shape[1] * 2)
    result: Tensor = _library().dequantize_4bit(
        weight.contiguous(), scales.contiguous().flatten(), BLOCK, "nf4", shape, dtype
    )
    return result
