"""The Triton kernel of Lion: one launch for all tensors of a kind. Imported only if Triton is installed."""

import triton
import triton.language as tl
from torch import Tensor

from shoal.optim.eight_bit import FIRST
from shoal.optim.fused import Hyperparameters, TensorLists
from shoal.parallel.multi_tensor import TRITON_DTYPES, Description, TensorTable, pointers_of, typed

CHUNK = 1024  # elements of a program
WARPS = 8

# The rows of the table.
GRADIENTS, WEIGHTS, AVERAGES, COPIES, SIZE = (tl.constexpr(row) for row in range(5))


@triton.jit(do_not_specialize=["count", "lr", "kept", "direction_share", "average_share"])
def _lion(
    owners,
    starts,
    table,
    count,  # of tensors, the length of a row
    usable,
    factor,  # or None
    lr,
    kept,
    direction_share,
    average_share,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    AVERAGE: tl.constexpr,
    COPY: tl.constexpr,  # or None
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(owners + program)
    is_usable = tl.load(usable)
    entry = table + tensor
    weights = typed(tl.load(entry + WEIGHTS * count), WEIGHT, ALIGNED)
    gradients = typed(tl.load(entry + GRADIENTS * count), GRADIENT, ALIGNED)
    averages = typed(tl.load(entry + AVERAGES * count), AVERAGE, ALIGNED)
    size = tl.load(entry + SIZE * count)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    offsets = (program - tl.load(starts + tensor)) * CHUNK + tl.arange(0, CHUNK)
    if is_usable == 0:
        return
    inside = offsets < size
    weight = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + offsets, mask=inside, other=0.0).to(tl.float32)
    average = tl.load(averages + offsets, mask=inside, other=0.0).to(tl.float32)
    if factor is not None:
        gradient = gradient * tl.load(factor)
    change = gradient - average
    direction = average + change * direction_share
    direction = tl.where(direction > 0, lr, tl.where(direction < 0, -lr, 0.0))
    weight = (weight * kept - direction).to(WEIGHT)
    tl.store(weights + offsets, weight, mask=inside)
    if COPY is not None:
        copies = typed(tl.load(entry + COPIES * count), COPY, ALIGNED)
        tl.store(copies + offsets, weight.to(COPY), mask=inside)
    tl.store(averages + offsets, (average + change * average_share).to(AVERAGE), mask=inside)


class LionKernel:
    """The update of one parameter group; `Lion.eager` is the same in PyTorch operations."""

    def __init__(self) -> None:
        self.table = TensorTable()

    def __call__(
        self, tensors: TensorLists, hyperparameters: Hyperparameters, usable: Tensor, factor: Tensor | None
    ) -> None:
        table, weights, averages, copies = self.table, tensors.weights, tensors.state[FIRST], tensors.copies
        gradients = [one if one.is_contiguous() else one.contiguous() for one in tensors.gradients]
        fixed = [pointers_of(some) for some in (weights, averages, copies)]
        table.refresh(gradients, fixed, lambda: _describe(tensors))
        first, second = hyperparameters.betas
        for launch in table.launches:
            gradient, weight, average, copy = launch.kind
            _lion[(launch.programs,)](
                launch.owners,
                table.starts,
                table.table,
                len(weights),
                usable,
                factor,
                hyperparameters.lr,
                hyperparameters.kept,
                1 - first,
                1 - second,
                WEIGHT=TRITON_DTYPES[weight],
                GRADIENT=TRITON_DTYPES[gradient],
                AVERAGE=TRITON_DTYPES[average],
                COPY=None if copy is None else TRITON_DTYPES[copy],
                ALIGNED=launch.aligned,
                CHUNK=CHUNK,
                num_warps=WARPS,
                enable_fp_fusion=False,
            )


def _describe(tensors: TensorLists) -> Description:
    weights, averages, copies = tensors.weights, tensors.state[FIRST], tensors.copies
    assert all(one is None or one.is_contiguous() for one in (*weights, *averages, *copies))
    kinds = [
        (weight.dtype, average.dtype, None if copy is None else copy.dtype)
        for weight, average, copy in zip(weights, averages, copies, strict=True)
    ]
    sizes = [one.numel() for one in weights]
    return Description(kinds, [-(-size // CHUNK) for size in sizes], sizes)
