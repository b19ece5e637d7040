"""The CUDA kernel of AdamW: every number is read once and written once. Imported only where there is Triton."""

import triton
import triton.language as tl
from torch import Tensor

from shoal.models.tensor_slices import BLOCK
from shoal.optim.adamw_update import Numbers, Tensors
from shoal.optim.eight_bit import FIRST, OF_PLACE, OF_STEP, SCALES, SECOND

ROWS = 4  # a program works on so many rows of a block, or on as many numbers in a line
# Those with the fewest barriers in what the compiler makes of it; benchmarks/gpu/adamw_check.py times others too.
WARPS, WARPS_IN_BLOCKS = 8, 4


@triton.jit(do_not_specialize=["correction", "rate", "kept", "first_share", "second_kept", "second_share", "eps"])
def _adamw(
    weights,
    gradients,
    firsts,
    seconds,
    first_scales,  # None: moments are not in 8 bits
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
    height,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OF_STEP: tl.constexpr,
    OF_PLACE: tl.constexpr,
) -> None:
    if tl.load(usable) == 0:
        return
    # In 64 bits: a tensor may have more numbers than 32 can count.
    program = tl.program_id(0).to(tl.int64)
    if first_scales is not None:
        across = tl.cdiv(width, BLOCK)
        rows = program // across * ROWS + tl.arange(0, ROWS)
        block = program % across
        columns = block * BLOCK + tl.arange(0, BLOCK)
        places = rows[:, None] * width + columns[None, :]
        inside = (rows < height)[:, None] & (columns < width)[None, :]
        blocks = rows * across + block
    else:
        places = program * (ROWS * BLOCK) + tl.arange(0, ROWS * BLOCK)
        inside = places < width

    weight = tl.load(weights + places, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(gradients + places, mask=inside, other=0.0).to(tl.float32)
    first = tl.load(firsts + places, mask=inside, other=0).to(tl.float32)
    second = tl.load(seconds + places, mask=inside, other=0).to(tl.float32)
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

    weight = weight.to(weights.dtype.element_ty)
    tl.store(weights + places, weight, mask=inside)
    if copies is not None:
        tl.store(copies + places, weight.to(copies.dtype.element_ty), mask=inside)
    if first_scales is not None:
        first_scale = tl.max(tl.abs(first), axis=1)
        second_scale = tl.max(second, axis=1)
        tl.store(first_scales + blocks, first_scale, mask=rows < height)
        tl.store(second_scales + blocks, second_scale, mask=rows < height)
        first_scale = tl.where(first_scale > 0, first_scale, 1.0)  # a block of zeros
        second_scale = tl.where(second_scale > 0, second_scale, 1.0)
        root = tl.floor(tl.sqrt(tl.abs(first) / first_scale[:, None]) * 127 + 0.5)
        first = tl.where(first < 0, -root, root)
        mixed = tl.load(step).to(tl.uint32) * OF_STEP + tl.arange(0, BLOCK).to(tl.uint32) * OF_PLACE
        turn = (mixed >> 8).to(tl.float32) * (1 / 16777216)
        root = tl.floor(tl.sqrt(tl.sqrt(second / second_scale[:, None])) * 255 + turn[None, :])
        # Never nothing out of something, by which the next step would divide; and an approximate root may be too large.
        second = tl.where(second > 0, tl.minimum(tl.maximum(root, 1.0), 255.0), 0.0)
    tl.store(firsts + places, first.to(firsts.dtype.element_ty), mask=inside)
    tl.store(seconds + places, second.to(seconds.dtype.element_ty), mask=inside)


def update(tensors: Tensors, numbers: Numbers, usable: Tensor, factor: Tensor | None) -> None:
    """One parameter's step: see `shoal.optim.adamw`, whose `_update` says the same in torch's words."""
    weight, state = tensors.weight, tensors.state
    assert all(one.is_contiguous() for one in (weight, *state.values())), "weights and states lie row after row"
    assert tensors.copy is None or tensors.copy.is_contiguous()
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
        numbers.lr,
        numbers.kept,
        1 - numbers.betas[0],
        numbers.betas[1],
        1 - numbers.betas[1],
        numbers.eps,
        height,
        width,
        ROWS=ROWS,
        BLOCK=BLOCK,
        OF_STEP=OF_STEP,
        OF_PLACE=OF_PLACE,
        num_warps=WARPS_IN_BLOCKS if tensors.in_eight_bits else WARPS,
    )
