"""The Triton kernel of AdamW: every element is read once and written once. Imported only if Triton is installed."""

import triton
import triton.language as tl
from torch import Tensor

from shoal.models.tensor_slices import BLOCK
from shoal.optim import rounding
from shoal.optim.adamw_update import Hyperparameters, Tensors
from shoal.optim.eight_bit import FIRST, INDEX_MULTIPLIER, SCALES, SECOND, STEP_MULTIPLIER

ROWS = 4  # a program processes ROWS × BLOCK elements: rows of blocks with 8-bit moments, else contiguous elements
# These need the fewest barriers in the compiled kernel; benchmarks/gpu/adamw_check.py times others too.
WARPS, WARPS_IN_BLOCKS = 8, 4

# Of `rounding`: a kernel reads no other globals.
FIRST_MULTIPLIER = tl.constexpr(rounding.FIRST_MULTIPLIER)
SECOND_MULTIPLIER = tl.constexpr(rounding.SECOND_MULTIPLIER)
SALT_MULTIPLIER = tl.constexpr(rounding.STEP_MULTIPLIER)
HIGH_MULTIPLIER = tl.constexpr(rounding.HIGH_MULTIPLIER)


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


@triton.jit(
    do_not_specialize=["correction", "lr", "kept", "first_share", "second_kept", "second_share", "eps", "key", "start"]
)
def _adamw(
    weights,
    gradients,
    firsts,
    seconds,
    first_scales,  # or None: moments are not in 8 bits
    second_scales,
    copies,  # or None
    usable,
    factor,  # or None
    step,
    correction,
    lr,
    kept,
    first_share,
    second_kept,
    second_share,
    eps,
    key,
    start,
    index_rows,  # or None: indices of elements are consecutive, from `start`
    index_columns,
    row,
    height,
    width,
    STOCHASTIC: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP_MULTIPLIER: tl.constexpr,
    INDEX_MULTIPLIER: tl.constexpr,
) -> None:
    if tl.load(usable) == 0:
        return
    # int64: a tensor may have more than 2**31 elements.
    program = tl.program_id(0).to(tl.int64)
    if first_scales is not None:
        across = tl.cdiv(width, BLOCK)
        rows = program // across * ROWS + tl.arange(0, ROWS)
        block = program % across
        columns = block * BLOCK + tl.arange(0, BLOCK)
        offsets = rows[:, None] * width + columns[None, :]
        inside = (rows < height)[:, None] & (columns < width)[None, :]
        blocks = rows * across + block
    else:
        offsets = program * (ROWS * BLOCK) + tl.arange(0, ROWS * BLOCK)
        inside = offsets < width

    weight = tl.load(weights + offsets, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + offsets, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(firsts + offsets, mask=inside, other=0).to(tl.float32)
    second = tl.load(seconds + offsets, mask=inside, other=0).to(tl.float32)
    if first_scales is not None:
        first_scale = tl.load(first_scales + blocks, mask=rows < height, other=0.0)
        second_scale = tl.load(second_scales + blocks, mask=rows < height, other=0.0)
        first = first * (1 / 127)
        first = first * tl.abs(first) * first_scale[:, None]
        second = second * (1 / 255)
        second = second * second
        second = second * second * second_scale[:, None]
    if factor is not None:
        gradient = gradient * tl.load(factor)

    first = first + (gradient - first) * first_share
    second = second * second_kept + gradient * gradient * second_share
    direction = first / (tl.sqrt(second) / tl.load(correction + 1) + eps)
    weight = weight * kept - direction * (lr / tl.load(correction))

    if STOCHASTIC:
        if index_rows is not None:
            index = tl.load(index_rows + offsets // row, mask=inside, other=0)
            index += tl.load(index_columns + offsets % row, mask=inside, other=0)
        else:
            index = offsets + start
        weight = _round(weight, index, key, tl.load(step))
    weight = weight.to(weights.dtype.element_ty)
    tl.store(weights + offsets, weight, mask=inside)
    if copies is not None:
        tl.store(copies + offsets, weight.to(copies.dtype.element_ty), mask=inside)
    if first_scales is not None:
        first_scale = tl.max(tl.abs(first), axis=1)
        second_scale = tl.max(second, axis=1)
        tl.store(first_scales + blocks, first_scale, mask=rows < height)
        tl.store(second_scales + blocks, second_scale, mask=rows < height)
        first_scale = tl.where(first_scale > 0, first_scale, 1.0)  # a block of zeros
        second_scale = tl.where(second_scale > 0, second_scale, 1.0)
        root = tl.floor(tl.sqrt(tl.abs(first) / first_scale[:, None]) * 127 + 0.5)
        first = tl.where(first < 0, -root, root)
        mixed = tl.load(step).to(tl.uint32) * STEP_MULTIPLIER + tl.arange(0, BLOCK).to(tl.uint32) * INDEX_MULTIPLIER
        dither = (mixed >> 8).to(tl.float32) * (1 / 16777216)
        root = tl.floor(tl.sqrt(tl.sqrt(second / second_scale[:, None])) * 255 + dither[None, :])
        # A positive value must not become 0, by which the next step would divide; an approximate root may exceed 255.
        second = tl.where(second > 0, tl.minimum(tl.maximum(root, 1.0), 255.0), 0.0)
    tl.store(firsts + offsets, first.to(firsts.dtype.element_ty), mask=inside)
    tl.store(seconds + offsets, second.to(seconds.dtype.element_ty), mask=inside)


def update(tensors: Tensors, hyperparameters: Hyperparameters, usable: Tensor, factor: Tensor | None) -> None:
    """Update one parameter. `adamw_update.update` is the same in PyTorch operations."""
    weight, state = tensors.weight, tensors.state
    assert all(one.is_contiguous() for one in (weight, *state.values())), "weights and states must be contiguous"
    assert tensors.copy is None or tensors.copy.is_contiguous()
    stochastic = tensors.rounding
    key, start, rows, columns = 0, 0, None, None
    if stochastic is not None:
        key, start = stochastic.key, stochastic.start or 0
        if stochastic.start is None:
            rows, columns = stochastic.rows, stochastic.columns
    if tensors.in_eight_bits:
        width = weight.shape[-1]
        height = weight.numel() // width
        programs = triton.cdiv(height, ROWS) * triton.cdiv(width, BLOCK)
    else:
        height, width = 1, weight.numel()
        programs = triton.cdiv(width, ROWS * BLOCK)
    _adamw[(programs,)](
        weight,
        tensors.gradient.contiguous(),
        state[FIRST],
        state[SECOND],
        state.get(SCALES[FIRST]),
        state.get(SCALES[SECOND]),
        tensors.copy,
        usable,
        factor,
        state["step"],
        tensors.correction,
        hyperparameters.lr,
        hyperparameters.kept,
        1 - hyperparameters.betas[0],
        hyperparameters.betas[1],
        1 - hyperparameters.betas[1],
        hyperparameters.eps,
        key,
        start,
        rows,
        columns,
        weight.shape[-1] if weight.dim() else 1,
        height,
        width,
        STOCHASTIC=stochastic is not None,
        ROWS=ROWS,
        BLOCK=BLOCK,
        STEP_MULTIPLIER=STEP_MULTIPLIER,
        INDEX_MULTIPLIER=INDEX_MULTIPLIER,
        num_warps=WARPS_IN_BLOCKS if tensors.in_eight_bits else WARPS,
    )
