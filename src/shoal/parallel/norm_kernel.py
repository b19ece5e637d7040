"""The sum of squares of many tensors in fp64, in two launches. Imported only if Triton is installed."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.parallel.multi_tensor import TRITON_DTYPES, Description, TensorTable, typed

CHUNK = 4096  # elements of a program
WARPS = 8

# The rows of the table.
VALUES, SIZE = tl.constexpr(0), tl.constexpr(1)


@triton.jit(do_not_specialize=["count", "first"])
def _squares(
    owners,
    starts,
    table,
    count,  # of tensors, the length of a row
    sums,
    first,  # the element of `sums` for the first program
    DTYPE: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(owners + program)
    values = typed(tl.load(table + VALUES * count + tensor), DTYPE, ALIGNED)
    size = tl.load(table + SIZE * count + tensor)
    if ALIGNED:
        size = tl.multiple_of(size, 16)
    offsets = (program - tl.load(starts + tensor)) * CHUNK + tl.arange(0, CHUNK)
    value = tl.load(values + offsets, mask=offsets < size, other=0.0).to(tl.float64)
    tl.store(sums + first + program, tl.sum(value * value, axis=0))


class SumOfSquares:
    """Of the tensors of each call, in an order that depends on nothing but their sizes, dtypes and alignment."""

    def __init__(self) -> None:
        self.table = TensorTable()

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        table = self.table
        tensors = [one if one.is_contiguous() else one.contiguous() for one in tensors]
        sizes = [one.numel() for one in tensors]
        programs = [-(-size // CHUNK) for size in sizes]
        table.refresh(tensors, [sizes], lambda: Description([()] * len(sizes), programs, sizes))
        sums = torch.empty(sum(programs), dtype=torch.float64, device=tensors[0].device)
        first = 0
        for launch in table.launches:
            _squares[(launch.programs,)](
                launch.owners,
                table.starts,
                table.table,
                len(tensors),
                sums,
                first,
                DTYPE=TRITON_DTYPES[launch.kind[0]],
                ALIGNED=launch.aligned,
                CHUNK=CHUNK,
                num_warps=WARPS,
            )
            first += launch.programs
        return sums.sum()
