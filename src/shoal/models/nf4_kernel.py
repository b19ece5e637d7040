"""The Triton kernel behind `nf4.dequantize`. Imported on CUDA only."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Blocks of 64 that a program dequantizes. To bf16 a thread reads 4 bytes and writes 16: with fewer threads per block,
# elements would be exchanged through shared memory for coalesced stores. benchmarks/gpu/nf4.py times others too.
BLOCKS, WARPS = 16, 1


@triton.jit
def _dequantize(
    weights,
    scales,  # fp32, or with double quantization 8-bit codes
    nested_scales,  # or None: no double quantization
    offset,
    results,
    table,
    nested_table,
    blocks,
    NESTED_BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    BYTES: tl.constexpr,
):
    # Blocks are contiguous and do not cross rows, so the matrix is a flat list of them. int64: it may be longer than
    # 2**31 elements.
    block = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    inside = block < blocks
    byte = block[:, None] * BYTES + tl.arange(0, BYTES)[None, :]
    codes = tl.load(weights + byte, inside[:, None], other=0).to(tl.int32)
    scale = tl.load(scales + block, inside, other=0)
    if nested_scales is not None:
        nested_scale = tl.load(nested_scales + block // NESTED_BLOCK, inside, other=0.0)
        scale = tl.load(nested_table + scale.to(tl.int32)) * nested_scale + tl.load(offset)
    # All 16 values are in one cache line, so that a lookup of a warp is a single access to L1.
    first = tl.load(table + (codes >> 4)) * scale[:, None]
    second = tl.load(table + (codes & 15)) * scale[:, None]
    values = tl.join(first, second).reshape(BLOCKS, 2 * BYTES).to(results.dtype.element_ty)
    element = block[:, None] * (2 * BYTES) + tl.arange(0, 2 * BYTES)[None, :]
    tl.store(results + element, values, inside[:, None])


def dequantize_kernel(
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    dtype: torch.dtype,
    table: Tensor,
    nested_table: Tensor,
    nested_block: int,
) -> Tensor:
    """The matrix that these tensors store; `table` and `nested_table` are the values of 4-bit and of 8-bit codes."""
    result = torch.empty((weight.shape[0], weight.shape[1] * 2), dtype=dtype, device=weight.device)
    scales, nested_scales, offset = absmax.contiguous(), None, None
    if nested_absmax is None or nested_offset is None:
        scales = scales.view(torch.float32)
    else:
        nested_scales, offset = nested_absmax.view(torch.float32), nested_offset.view(torch.float32)
    _dequantize[(triton.cdiv(absmax.numel(), BLOCKS),)](
        weight.contiguous(),
        scales,
        nested_scales,
        offset,
        result,
        table,
        nested_table,
        absmax.numel(),
        nested_block,
        BLOCKS,
        weight.shape[1] // absmax.shape[1],
        num_warps=WARPS,
        # A fused multiply-add of nested scales would round once where bitsandbytes and the CPU round twice.
        enable_fp_fusion=False,
    )
    return result
