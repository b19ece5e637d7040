"""The Triton kernel of AdamW: one launch for all tensors of a kind, in which every element is read once and written
once. Imported only if Triton is installed."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.models.tensor_slices import BLOCK
from shoal.optim import rounding
from shoal.optim.adamw_update import bias_corrections
from shoal.optim.eight_bit import FIRST, INDEX_MULTIPLIER, SCALES, SECOND, STEP_MULTIPLIER
from shoal.optim.fused import Hyperparameters, TensorLists
from shoal.parallel.multi_tensor import TRITON_DTYPES, Description, TensorTable, pointers_of, typed

# Elements of a program: contiguous ones, or with 8-bit moments a block of each of some rows. These and the numbers of
# warps need few barriers in the compiled kernel; benchmarks/gpu/optimizer.py times others too.
CHUNK, ROWS = 1024, 2
WARPS, WARPS_IN_BLOCKS = 8, 2

# Of `rounding`: a kernel reads no other globals.
FIRST_MULTIPLIER = tl.constexpr(rounding.FIRST_MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(rounding.SECOND_MULTIPLIER)
SALT_MULTIPLIER = tl.constexpr(rounding.STEP_MULTIPLIER)
HIGH_MULTIPLIER = tl.constexpr(rounding.HIGH_MULTIPLIER)
# The rows of the table: pointers; the width and height of a tensor with 8-bit moments, else its size; what stochastic
# rounding needs.
GRADIENTS, WEIGHTS, FIRSTS, SECONDS, FIRST_SCALES, SECOND_SCALES, COPIES = (tl.constexpr(row) for row in range(7))
WIDTH, HEIGHT = tl.constexpr(7), tl.constexpr(8)
KEY, START, INDEX_ROWS, INDEX_COLUMNS, ROW_LENGTH = (tl.constexpr(row) for row in range(9, 14))


@triton.jit
def _mix(word):
    word = (word ^ (word >> 16)) * FIRST_MULTIPLIER
    word = (word ^ (word >> 15)) * SECOND_MULTIPLIER
    return word ^ (word >> 16)


@triton.jit
def _round(values, index, key, step):
    """`rounding.StochasticRounding.round`."""
    salt = _mix(key.to(tl.uint32) + step.to(tl.uint32) * SALT_MULTIPLIER)
    bits = _mix(index.to(tl.uint32) ^ (salt + (index >> 32).to(tl.uint32) * HIGH_MULTIPLIER)) >> 16
    rounded = ((values.to(tl.uint32, bitcast=True) + bits) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(values - values == 0, rounded, values)  # neither infinite nor NaN


@triton.jit(do_not_specialize=["count", "lr", "kept", "first_share", "second_kept", "second_share", "eps"])
def _adamw(
    owners,
    starts,
    table,
    count,  # of tensors, the length of a row
    steps,
    corrections,
    usable,
    factor,  # or None
    lr,
    kept,
    first_share,
    second_kept,
    second_share,
    eps,
    WEIGHT: tl.constexpr,
    GRADIENT: tl.constexpr,
    STATE: tl.constexpr,
    SECOND_STATE: tl.constexpr,
    COPY: tl.constexpr,  # or None
    ALIGNED: tl.constexpr,
    EIGHT_BITS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    INDEXED: tl.constexpr,  # the indices of elements are not consecutive
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP_MULTIPLIER: tl.constexpr,
    INDEX_MULTIPLIER: tl.constexpr,
) -> None:
    # int64: a tensor may have more than 2**31 elements.
    program = tl.program_id(0).to(tl.int64)
    tensor = tl.load(owners + program)
    is_usable = tl.load(usable)
    entry = table + tensor
    weights = typed(tl.load(entry + WEIGHTS * count), WEIGHT, ALIGNED)
    gradients = typed(tl.load(entry + GRADIENTS * count), GRADIENT, ALIGNED)
    firsts = typed(tl.load(entry + FIRSTS * count), STATE, ALIGNED)
    seconds = typed(tl.load(entry + SECONDS * count), SECOND_STATE, ALIGNED)
    width = tl.load(entry + WIDTH * count)
    if ALIGNED:
        width = tl.multiple_of(width, 16)
    program -= tl.load(starts + tensor)
    if is_usable == 0:
        return
    if EIGHT_BITS:
        height = tl.load(entry + HEIGHT * count)
        across = tl.cdiv(width, BLOCK)
        rows = program // across * ROWS + tl.arange(0, ROWS)
        block = program % across
        columns = block * BLOCK + tl.arange(0, BLOCK)
        offsets = rows[:, None] * width + columns[None, :]
        inside = (rows < height)[:, None] & (columns < width)[None, :]
        blocks = rows * across + block
    else:
        offsets = program * CHUNK + tl.arange(0, CHUNK)
        inside = offsets < width

    weight = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + offsets, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(firsts + offsets, mask=inside, other=0).to(tl.float32)
    second = tl.load(seconds + offsets, mask=inside, other=0).to(tl.float32)
    if EIGHT_BITS:
        first_scales = typed(tl.load(entry + FIRST_SCALES * count), tl.float32, False)
        second_scales = typed(tl.load(entry + SECOND_SCALES * count), tl.float32, False)
        first_scale = tl.load(first_scales + blocks, mask=rows < height, other=0.0)
        second_scale = tl.load(second_scales + blocks, mask=rows < height, other=0.0)
        first = first * (1 / 127)
        first = first * tl.abs(first) * first_scale[:, None]
        second = second * (1 / 255)
        second = second * second
        second = second * second * second_scale[:, None]
    # Only these products are fused with a sum: the compiler would choose others with alignment than without.
    if factor is not None:
        scale = tl.load(factor)
        excess = tl.fma(gradient, -scale, first)
        gradient = gradient * scale
    else:
        excess = first - gradient
    first = tl.fma(excess, -first_share, first)
    second = tl.fma(second, second_kept, gradient * gradient * second_share)
    direction = first / (tl.sqrt(second) / tl.load(corrections + 2 * tensor + 1) + eps)
    weight = tl.fma(weight, kept, direction * (-lr / tl.load(corrections + 2 * tensor)))

    if STOCHASTIC:
        if INDEXED:
            row = tl.load(entry + ROW_LENGTH * count)
            index_rows = typed(tl.load(entry + INDEX_ROWS * count), tl.int64, False)
            index_columns = typed(tl.load(entry + INDEX_COLUMNS * count), tl.int64, False)
            index = tl.load(index_rows + offsets // row, mask=inside, other=0)
            index += tl.load(index_columns + offsets % row, mask=inside, other=0)
        else:
            index = offsets + tl.load(entry + START * count)
        weight = _round(weight, index, tl.load(entry + KEY * count), tl.load(steps + tensor))
    weight = weight.to(WEIGHT)
    tl.store(weights + offsets, weight, mask=inside)
    if COPY is not None:
        copies = typed(tl.load(entry + COPIES * count), COPY, ALIGNED)
        tl.store(copies + offsets, weight.to(COPY), mask=inside)
    if EIGHT_BITS:
        first_scale = tl.max(tl.abs(first), axis=1)
        second_scale = tl.max(second, axis=1)
        tl.store(first_scales + blocks, first_scale, mask=rows < height)
        tl.store(second_scales + blocks, second_scale, mask=rows < height)
        first_scale = tl.where(first_scale > 0, first_scale, 1.0)  # a block of zeros
        second_scale = tl.where(second_scale > 0, second_scale, 1.0)
        root = tl.floor(tl.sqrt(tl.abs(first) / first_scale[:, None]) * 127 + 0.5)
        first = tl.where(first < 0, -root, root)
        salt = tl.load(steps + tensor).to(tl.uint32) * STEP_MULTIPLIER
        mixed = salt + tl.arange(0, BLOCK).to(tl.uint32) * INDEX_MULTIPLIER
        dither = (mixed >> 8).to(tl.float32) * (1 / 16777216)
        root = tl.floor(tl.sqrt(tl.sqrt(second / second_scale[:, None])) * 255 + dither[None, :])
        # A positive value must not become 0, by which the next step would divide; an approximate root may exceed 255.
        second = tl.where(second > 0, tl.minimum(tl.maximum(root, 1.0), 255.0), 0.0)
    tl.store(firsts + offsets, first.to(STATE), mask=inside)
    tl.store(seconds + offsets, second.to(SECOND_STATE), mask=inside)


class Kind(NamedTuple):
    """What the tensors of one launch have in common."""

    gradient: torch.dtype
    weight: torch.dtype
    first: torch.dtype
    second: torch.dtype
    copy: torch.dtype | None
    stochastic: bool
    indexed: bool


class AdamWKernel:
    """The update of one parameter group; `adamw_update.update` is the same in PyTorch operations."""

    def __init__(self) -> None:
        self.table = TensorTable()

    def __call__(
        self, tensors: TensorLists, hyperparameters: Hyperparameters, usable: Tensor, factor: Tensor | None
    ) -> None:
        assert tensors.steps is not None
        state, table = tensors.state, self.table
        gradients = [one if one.is_contiguous() else one.contiguous() for one in tensors.gradients]
        in_eight_bits = SCALES[FIRST] in state
        nothing = [0] * len(gradients)
        scales = [pointers_of(state[field]) if in_eight_bits else nothing for field in SCALES.values()]
        fixed = [pointers_of(tensors.weights), *(pointers_of(state[field]) for field in (FIRST, SECOND)), *scales]
        table.refresh(gradients, [*fixed, pointers_of(tensors.copies)], lambda: _describe(tensors))
        corrections = bias_corrections(tensors.steps, hyperparameters.betas)
        for launch in table.launches:
            kind = Kind(*launch.kind)
            _adamw[(launch.programs,)](
                launch.owners,
                table.starts,
                table.table,
                len(gradients),
                tensors.steps,
                corrections,
                usable,
                factor,
                hyperparameters.lr,
                hyperparameters.kept,
                1 - hyperparameters.betas[0],
                hyperparameters.betas[1],
                1 - hyperparameters.betas[1],
                hyperparameters.eps,
                WEIGHT=TRITON_DTYPES[kind.weight],
                GRADIENT=TRITON_DTYPES[kind.gradient],
                STATE=TRITON_DTYPES[kind.first],
                SECOND_STATE=TRITON_DTYPES[kind.second],
                COPY=None if kind.copy is None else TRITON_DTYPES[kind.copy],
                ALIGNED=launch.aligned,
                EIGHT_BITS=in_eight_bits,
                STOCHASTIC=kind.stochastic,
                INDEXED=kind.indexed,
                CHUNK=CHUNK,
                ROWS=ROWS,
                BLOCK=BLOCK,
                STEP_MULTIPLIER=STEP_MULTIPLIER,
                INDEX_MULTIPLIER=INDEX_MULTIPLIER,
                num_warps=WARPS_IN_BLOCKS if in_eight_bits else WARPS,
                enable_fp_fusion=False,
            )


def _describe(tensors: TensorLists) -> Description:
    weights, state = tensors.weights, tensors.state
    written = [*weights, *(one for some in state.values() for one in some), *tensors.copies]
    assert all(one is None or one.is_contiguous() for one in written), "weights and states must be contiguous"
    kinds = list(
        zip(
            *([one.dtype for one in some] for some in (weights, state[FIRST], state[SECOND])),
            [None if one is None else one.dtype for one in tensors.copies],
            [one is not None for one in tensors.rounding],
            [one is not None and one.start is None for one in tensors.rounding],
            strict=True,
        )
    )
    if SCALES[FIRST] in state:
        widths = [one.shape[-1] for one in weights]
        heights = [one.numel() // max(1, one.shape[-1]) for one in weights]
        programs = [-(-height // ROWS) * -(-width // BLOCK) for height, width in zip(heights, widths, strict=True)]
    else:
        widths = [one.numel() for one in weights]
        heights = [1] * len(weights)
        programs = [-(-width // CHUNK) for width in widths]
    others = [heights]
    if any(one is not None for one in tensors.rounding):
        found = [(0, 0, 0, 0, 0) if one is None else _rounding_numbers(one) for one in tensors.rounding]
        others += [list(row) for row in zip(*found, strict=True)]
    return Description(kinds, programs, widths, others)


def _rounding_numbers(how: rounding.StochasticRounding) -> tuple[int, int, int, int, int]:
    """The key, the index of the first element, the pointers of the indices of rows and columns, the length of a row."""
    row = how.local[-1] if how.local else 1
    if how.start is not None:
        return how.key, how.start, 0, 0, row
    return how.key, 0, how.rows.data_ptr(), how.columns.data_ptr(), row
