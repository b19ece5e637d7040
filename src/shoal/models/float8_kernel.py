"""The Triton kernel behind `float8.cast_and_transpose`. Imported on CUDA only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS = 64, 128
ELEMENTS = 4096


@triton.jit
def _cast_tile(
    values, scale, row_major, column_major, rows, columns, stride, largest, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tile = tl.load(values + row[:, None] * stride + column[None, :], inside, other=0.0).to(tl.float32)
    tile = tile * tl.div_rn(1.0, tl.load(scale))  # one exact division per tile: bitwise equal to the CPU's
    tile = tl.minimum(tl.maximum(tile, -largest), largest).to(row_major.dtype.element_ty)
    tl.store(row_major + row[:, None] * columns + column[None, :], tile, inside)
    # Transposed in shared memory, so that these stores are coalesced too.
    tl.store(column_major + column[:, None] * rows + row[None, :], tl.trans(tile), tl.trans(inside))


@triton.jit
def _cast_elements(values, scale, result, count, largest, ELEMENTS: tl.constexpr):
    here = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    loaded = tl.load(values + here, here < count, other=0.0).to(tl.float32) * tl.div_rn(1.0, tl.load(scale))
    loaded = tl.minimum(tl.maximum(loaded, -largest), largest)
    tl.store(result + here, loaded.to(result.dtype.element_ty), here < count)


def cast_kernel(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    values = values.contiguous()
    result = torch.empty_like(values, dtype=dtype)
    grid = (triton.cdiv(values.numel(), ELEMENTS),)
    _cast_elements[grid](values, scale, result, values.numel(), torch.finfo(dtype).max, ELEMENTS, num_warps=8)
    return result


def cast_and_transpose_kernel(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if values.stride(1) != 1:
        values = values.contiguous()
    rows, columns = values.shape
    row_major = torch.empty((rows, columns), dtype=dtype, device=values.device)
    column_major = torch.empty((columns, rows), dtype=dtype, device=values.device)
    grid = (triton.cdiv(rows, ROWS), triton.cdiv(columns, COLUMNS))
    _cast_tile[grid](
        values, scale, row_major, column_major, rows, columns, values.stride(0), torch.finfo(dtype).max, ROWS, COLUMNS
    )
    return row_major, column_major
