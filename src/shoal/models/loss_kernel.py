"""The Triton kernels of the chunked loss. Logits are the largest tensor of a step: each is read twice and written once.
Imported only where Triton is installed."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# The fastest of those tried on an H200 (benchmarks/gpu/head.py) with 32,000 to 128,256 logits in a row; the wider tile
# is faster only where the last one is full.
TILES = {16384: 32, 8192: 16}  # columns: warps
ELEMENTS = 4096


@triton.jit
def _measure_row(
    logits,
    labels,
    losses,
    width,
    stored,
    stride,
    ignored,
    GRADIENT_SCALE: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Loads and stores are masked by `stored`, the row with its padding: only with an aligned mask are they vectorized.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    columns = tl.arange(0, COLUMNS)
    label = tl.load(labels + row)
    if label == ignored:
        for start in range(0, stored, COLUMNS):
            tl.store(logits + start + columns, 0.0, start + columns < stored)
        tl.store(losses + row, 0.0)
        return
    # A label outside of the vocabulary is an error: its loss is NaN, which the training loop reports.
    label_logit = tl.load(logits + label, (label >= 0) & (label < width), other=float("nan")).to(tl.float32)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, stored, COLUMNS):
        part = tl.load(logits + start + columns, start + columns < stored, other=float("-inf")).to(tl.float32)
        if PADDED:
            part = tl.where(start + columns < width, part, float("-inf"))
        larger = tl.maximum(most, tl.max(part, 0))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(part - larger), 0)
        most = larger
    log_sum_exp = most + tl.log(total)
    for start in range(0, stored, COLUMNS):
        inside = start + columns < stored
        part = tl.load(logits + start + columns, inside, other=0.0).to(tl.float32)
        grad_logits = tl.exp(part - log_sum_exp)
        grad_logits = tl.where(start + columns == label, grad_logits - 1, grad_logits)
        if PADDED:
            grad_logits = tl.where(start + columns < width, grad_logits, 0.0)
        if GRADIENT_SCALE != 1.0:
            grad_logits *= GRADIENT_SCALE
        tl.store(logits + start + columns, grad_logits.to(logits.dtype.element_ty), inside)
    tl.store(losses + row, log_sum_exp - label_logit)


@triton.jit
def _scale_and_cast(values, factor, scaled, count, ELEMENTS: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    product = tl.load(values + offsets, offsets < count) * tl.load(factor)
    tl.store(scaled + offsets, product.to(scaled.dtype.element_ty), offsets < count)


def measure_in_place(
    logits: Tensor, labels: Tensor, width: int, ignored: int, gradient_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """The loss of each token, and the gradient of their sum times `gradient_scale`, which overwrites the logits.
    Columns from `width` on are padding."""
    rows, stored = logits.shape
    assert logits.stride(1) == 1, "the logits of a token must be contiguous"
    columns = next((one for one in TILES if stored % one == 0), min(TILES))
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):  # Triton runs on the current one
        _measure_row[(rows,)](
            logits,
            labels.contiguous(),
            losses,
            width,
            stored,
            logits.stride(0),
            ignored,
            GRADIENT_SCALE=gradient_scale,
            PADDED=stored > width,
            COLUMNS=columns,
            num_warps=TILES[columns],
        )
    return losses, logits


def scale_and_cast(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` times `factor`, both fp32, cast to `dtype` in the same kernel."""
    assert values.is_contiguous()
    scaled = torch.empty_like(values, dtype=dtype)
    with torch.cuda.device(values.device):
        _scale_and_cast[(triton.cdiv(values.numel(), ELEMENTS),)](
            values, factor, scaled, values.numel(), ELEMENTS=ELEMENTS
        )
    return scaled
