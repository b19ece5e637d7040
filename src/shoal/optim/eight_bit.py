"""Moments of AdamW in 8 bits: how a number becomes a code and a code a number.

Up to `BLOCK` consecutive numbers of a row share a scale, the largest of them. No block crosses a row, so however rows
are divided over ranks every block is the same. A code is a root of the number's share of the scale: the square root
with its sign for the mean of gradients, the fourth root for the mean of their squares, so that small numbers, which are
most of them, are told apart too. Roots are taken by `sqrt` and undone by multiplying, which every device does nearly
alike.

A mean of squares changes by less than half a code in most steps, and rounded to the nearest code it would never change
at all. So it is rounded up or down in turns, up the more often the nearer it is to the upper code: see `turns`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.tensor_slices import BLOCK, blocks_of, local_tensor, placed_like

# Fewer numbers than this are not worth it: a norm or a bias is kept whole.
SMALLEST = 4096
FIRST, SECOND = "exp_avg", "exp_avg_sq"
SCALES = {FIRST: "exp_avg_scale", SECOND: "exp_avg_sq_scale"}
CODES = {FIRST: torch.int8, SECOND: torch.uint8}
# Multiples of these, modulo 2**32, are spread evenly, whichever of them one looks at.
OF_STEP, OF_PLACE = 2654435769, 3242174889


def is_kept_small(shape: tuple[int, ...]) -> bool:
    """Whether the moments of a parameter of this (whole) shape are kept in 8 bits."""
    return len(shape) >= 2 and torch.Size(shape).numel() >= SMALLEST


def empty_field(parameter: Tensor, field: str) -> Tensor:
    """A field of an 8-bit state of `parameter`, all zero, as a tensor that lies on the ranks as the parameter does."""
    local = local_tensor(parameter)
    if field in CODES:
        return placed_like(torch.zeros(local.shape, dtype=CODES[field], device=local.device), parameter)
    assert field in SCALES.values(), field
    shape = blocks_of(local.shape)
    return placed_like(torch.zeros(shape, device=local.device), parameter, blocks_of(parameter.shape))


def read_first(codes: Tensor, scales: Tensor) -> Tensor:
    """The mean of gradients that the codes stand for."""
    share = codes.float() * (1 / 127)
    return share * share.abs() * _spread(scales, codes)


def read_second(codes: Tensor, scales: Tensor) -> Tensor:
    """The mean of squares that the codes stand for."""
    share = codes.float() * (1 / 255)
    share = share * share
    return share * share * _spread(scales, codes)


def write_first(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Put `values` into `codes` and `scales`."""
    scales.copy_(_largest(values))
    share = (values.abs() / _divisor(scales, values)).sqrt()
    codes.copy_((share * 127 + 0.5).floor() * values.sign())


def write_second(values: Tensor, codes: Tensor, scales: Tensor, step: Tensor) -> None:
    """As `write_first`. What is more than nothing stays so, or the next step would divide by nothing."""
    scales.copy_(_largest(values))
    share = (values / _divisor(scales, values)).sqrt().sqrt()
    rounded = (share * 255 + turns(step, values.shape[-1])).floor()
    codes.copy_(torch.where(values > 0, rounded.clamp(min=1), 0))


def turns(step: Tensor, width: int) -> Tensor:
    """From 0 to 1 for each number of a row: what a code is raised by before it is rounded down.

    It follows from the step and the place in the block alone, and so is the same on any mesh and after any resume.
    """
    places = torch.arange(width, device=step.device) % BLOCK
    mixed = (step.long() * OF_STEP + places * OF_PLACE) % 2**32
    return (mixed >> 8).float() * 2.0**-24


def _largest(values: Tensor) -> Tensor:
    padded = F.pad(values.abs(), (0, -values.shape[-1] % BLOCK))
    return padded.reshape(*values.shape[:-1], -1, BLOCK).amax(-1)


def _divisor(scales: Tensor, values: Tensor) -> Tensor:
    return _spread(torch.where(scales > 0, scales, 1), values)  # a block of zeros


def _spread(scales: Tensor, values: Tensor) -> Tensor:
    """The scale of every number."""
    return scales.repeat_interleave(BLOCK, dim=-1)[..., : values.shape[-1]]
