"""The CUDA kernels of the chunked loss: logits are the largest tensor there is, and each is read twice and written
once. Imported only where there is Triton."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, WARPS = 16384, 32  # the fastest of those tried on an H200, with 128,256 logits in a row
NUMBERS = 4096


@triton.jit
def _measure_row(logits, labels, losses, width, stride, ignored, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    columns = tl.arange(0, COLUMNS)
    label = tl.load(labels + row)
    if label == ignored:
        for start in range(0, width, COLUMNS):
            tl.store(logits + start + columns, 0.0, start + columns < width)
        tl.store(losses + row, 0.0)
        return
    # A label outside of the vocabulary is nobody's intention: its loss is not a number, and the run says so.
    target = tl.load(logits + label, (label >= 0) & (label < width), other=float("nan")).to(tl.float32)
    most = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in range(0, width, COLUMNS):
        part = tl.load(logits + start + columns, start + columns < width, other=float("-inf")).to(tl.float32)
        larger = tl.maximum(most, tl.max(part, 0))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(part - larger), 0)
        most = larger
    logarithm = most + tl.log(total)
    for start in range(0, width, COLUMNS):
        inside = start + columns < width
        part = tl.load(logits + start + columns, inside, other=0.0).to(tl.float32)
        grad_logits = tl.exp(part - logarithm)
        grad_logits = tl.where(start + columns == label, grad_logits - 1, grad_logits)
        tl.store(logits + start + columns, grad_logits.to(logits.dtype.element_ty), inside)
    tl.store(losses + row, logarithm - target)


@triton.jit
def _multiply(values, factor, products, count, NUMBERS: tl.constexpr):
    places = tl.program_id(0).to(tl.int64) * NUMBERS + tl.arange(0, NUMBERS)
    product = tl.load(values + places, places < count) * tl.load(factor)
    tl.store(products + places, product.to(products.dtype.element_ty), places < count)


def measure_in_place(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    """The summed loss, and its slope, which takes the logits' place."""
    rows, width = logits.shape
    assert logits.stride(1) == 1, "the logits of a token lie in a row"
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    with torch.cuda.device(logits.device):  # Triton runs on the current one
        _measure_row[(rows,)](
            logits, labels.contiguous(), losses, width, logits.stride(0), ignored, COLUMNS=COLUMNS, num_warps=WARPS
        )
    return losses.sum(), logits


def multiplied(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` times `factor`, both fp32, rounded to `dtype` in the same pass."""
    assert values.is_contiguous()
    products = torch.empty_like(values, dtype=dtype)
    with torch.cuda.device(values.device):
        _multiply[(triton.cdiv(values.numel(), NUMBERS),)](values, factor, products, values.numel(), NUMBERS=NUMBERS)
    return products
