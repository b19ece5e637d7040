"""Stochastic rounding of bf16 weights.

An update is computed in fp32. Rounded to nearest, it is lost if it is smaller than half the spacing of bf16 values,
which is up to 0.8% of a weight. Rounded up or down at random, in proportion to the remainder, it is right on average,
without an fp32 copy of the weights.

The random bits are a hash of the seed, the parameter's name, its step count and the index of the element in the
unsharded parameter. So replicas round alike, a shard has the same result as in the full tensor, and a resumed run
rounds as one that was never interrupted. adamw_kernel.py has the same hash for CUDA.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from shoal.models.tensor_slices import SliceMapping

# An integer hash with little bias (Wellons, 2018), and odd multipliers for what it is salted with.
FIRST_MULTIPLIER, SECOND_MULTIPLIER = 0x7FEB352D, 0x846CA68B
STEP_MULTIPLIER, HIGH_MULTIPLIER = 2654435769, 3242174889
WORD = 0xFFFFFFFF


@dataclass(frozen=True)
class StochasticRounding:
    """How this rank rounds its part of one parameter."""

    key: int  # of the seed and the parameter's name
    whole: tuple[int, ...]  # the unsharded shape
    local: tuple[int, ...]
    mappings: Sequence[SliceMapping]  # the slices of the parameter that the local tensor holds
    device: torch.device

    @cached_property
    def start(self) -> int | None:
        """The index of the first local element, if all local elements are consecutive; else None."""
        if len(self.mappings) != 1:
            return None
        (held,) = self.mappings
        if held.whole.shape[1:] != self.whole[1:]:
            return None
        return held.whole.offset[0] * math.prod(self.whole[1:]) if self.whole else 0

    @cached_property
    def rows(self) -> Tensor:
        """The index of the first element of each unsharded row of which a part is here."""
        found = torch.zeros(self.local[:-1], dtype=torch.int64)
        for held in self.mappings:
            index = torch.zeros((), dtype=torch.int64)
            for dimension, start in enumerate(held.whole.offset[:-1]):
                along = torch.arange(start, start + held.whole.shape[dimension])
                index = index[..., None] + along * math.prod(self.whole[dimension + 1 :])
            found[held.local.slices[:-1]] = index
        return found.flatten().to(self.device)

    @cached_property
    def columns(self) -> Tensor:
        """The index of each element of a local row in the unsharded row."""
        found = torch.zeros(self.local[-1], dtype=torch.int64)
        for held in self.mappings:
            start = held.whole.offset[-1]
            found[held.local.slices[-1]] = torch.arange(start, start + held.whole.shape[-1])
        return found.to(self.device)

    def index(self) -> Tensor:
        """The index of each local element in the unsharded parameter."""
        if self.start is not None:
            return torch.arange(self.start, self.start + math.prod(self.local), device=self.device).view(self.local)
        return (self.rows[:, None] + self.columns).view(self.local)

    def round(self, values: Tensor, step: Tensor) -> Tensor:
        """fp32 values that bf16 has, one of the two nearest to each of `values`."""
        index = self.index()
        salt = _mix((self.key + step.long() * STEP_MULTIPLIER) & WORD)
        bits = _mix((index & WORD) ^ ((salt + (index >> 32) * HIGH_MULTIPLIER) & WORD)) >> 16
        rounded = ((values.view(torch.int32) + bits.int()) & -65536).view(torch.float32)
        return torch.where(values.isfinite(), rounded, values)


def rounding_key(seed: int, name: str) -> int:
    """31 bits, so that it is an int32 for the kernel."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:4]) >> 1


def _mix(word: Tensor) -> Tensor:
    """A hash of 32-bit words, which are in int64. Products overflow, but their lower bits are right."""
    word = ((word ^ (word >> 16)) * FIRST_MULTIPLIER) & WORD
    word = ((word ^ (word >> 15)) * SECOND_MULTIPLIER) & WORD
    return word ^ (word >> 16)
