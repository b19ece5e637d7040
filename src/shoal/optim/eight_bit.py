"""Blockwise 8-bit quantization of the moments of AdamW.

Up to `BLOCK` consecutive elements of a row share a scale, their absolute maximum. No block crosses a row, so every
block is the same however rows are sharded over ranks. A code is a root of value / scale: the signed square root for the
first moment, the fourth root for the second, so that small values, which are most of them, are resolved too. Roots are
computed with `sqrt` and inverted by multiplication, which give nearly the same results on every device.

The second moment changes by less than half a code in most steps, and rounding to nearest would never change it. So a
deterministic dither is added before rounding down, which rounds up in proportion to the remainder: see `dither`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.tensor_slices import BLOCK, blocks_of, local_tensor, placed_like

# Smaller tensors, such as norms and biases, keep fp32 moments.
SMALLEST = 4096
FIRST, SECOND = "exp_avg", "exp_avg_sq"
SCALES = {FIRST: "exp_avg_scale", SECOND: "exp_avg_sq_scale"}
CODES = {FIRST: torch.int8, SECOND: torch.uint8}
# Multiples of these, modulo 2**32, are evenly distributed (Weyl sequences).
STEP_MULTIPLIER, INDEX_MULTIPLIER = 2654435769, 3242174889


def is_quantized(shape: tuple[int, ...]) -> bool:
    """Whether the moments of a parameter with this unsharded shape are kept in 8 bits."""
    return len(shape) >= 2 and torch.Size(shape).numel() >= SMALLEST


def empty_field(parameter: Tensor, field: str) -> Tensor:
    """A zero-filled 8-bit state field of `parameter`, sharded like the parameter."""
    local = local_tensor(parameter)
    if field in CODES:
        return placed_like(torch.zeros(local.shape, dtype=CODES[field], device=local.device), parameter)
    assert field in SCALES.values(), field
    shape = blocks_of(local.shape)
    return placed_like(torch.zeros(shape, device=local.device), parameter, blocks_of(parameter.shape))


def read_first(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize the first moment."""
    share = codes.float() * (1 / 127)
    return share * share.abs() * _expand(scales, codes)


def read_second(codes: Tensor, scales: Tensor) -> Tensor:
    """Dequantize the second moment."""
    share = codes.float() * (1 / 255)
    share = share * share
    return share * share * _expand(scales, codes)


def write_first(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Quantize the first moment into `codes` and `scales`."""
    scales.copy_(_block_maximum(values))
    share = (values.abs() / _divisor(scales, values)).sqrt()
    codes.copy_((share * 127 + 0.5).floor() * values.sign())


def write_second(values: Tensor, codes: Tensor, scales: Tensor, step: Tensor) -> None:
    """Quantize the second moment. Positive values stay positive, or the next step would divide by zero."""
    scales.copy_(_block_maximum(values))
    share = (values / _divisor(scales, values)).sqrt().sqrt()
    rounded = (share * 255 + dither(step, values.shape[-1])).floor()
    codes.copy_(torch.where(values > 0, rounded.clamp(min=1), 0))


def dither(step: Tensor, width: int) -> Tensor:
    """Values in [0, 1) for each element of a row, added to a code before it is rounded down.

    A function of the step and the index in the block alone, so it is the same on any mesh and after any resume.
    """
    index = torch.arange(width, device=step.device) % BLOCK
    mixed = (step.long() * STEP_MULTIPLIER + index * INDEX_MULTIPLIER) % 2**32
    return (mixed >> 8).float() * 2.0**-24


def _block_maximum(values: Tensor) -> Tensor:
    padded = F.pad(values.abs(), (0, -values.shape[-1] % BLOCK))
    return padded.reshape(*values.shape[:-1], -1, BLOCK).amax(-1)


def _divisor(scales: Tensor, values: Tensor) -> Tensor:
    return _expand(torch.where(scales > 0, scales, 1), values)  # a block of zeros


def _expand(scales: Tensor, values: Tensor) -> Tensor:
    """Repeat the scale of each block for its elements."""
    return scales.repeat_interleave(BLOCK, dim=-1)[..., : values.shape[-1]]
