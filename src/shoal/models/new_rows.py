"""Rows of added tokens in embedding and head: each starts as the mean of the rows of the tokens that were there before.

A random row is far from the others and would make the first losses high; the mean is where a token is that nothing is
known about. It is computed from the files in fp64, one chunk of rows after another, so that the new rows are the same
bits on every rank and with every strategy, and only ranks that hold some of them read the rest.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from shoal.models.stored import ROWS_PER_CHUNK, Stored
from shoal.models.tensor_slices import TensorSlice, whole


@dataclass(frozen=True)
class NewRows:
    """Which rows of the embedding and the head are new."""

    indices: tuple[int, ...]  # the ids of the added tokens, and rows that only round the vocabulary up
    known: int  # ids below this are the tokens of the mean; rows between may be spare ones, which were never trained
    beyond: int  # the number of new rows that the files do not have: the last ones


@dataclass
class ExtendedRows:
    """A stored tensor with one row per token, in which the new rows are the mean of the known ones."""

    stored: Stored
    rows: NewRows

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stored.shape[0] + self.rows.beyond, *self.stored.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.stored.dtype, torch.float32)  # a mean of bf16 values is not one of them

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        first, count = tensor_slice.offset[0], tensor_slice.shape[0]
        new = [index - first for index in self.rows.indices if first <= index < first + count]
        if not new or tensor_slice.empty:
            return self.stored.read(tensor_slice)
        found = torch.empty(tensor_slice.shape, dtype=self.dtype)
        shared = tensor_slice.overlap(whole(self.stored.shape))
        if not shared.empty:
            found[shared.within(tensor_slice).slices] = self.stored.read(shared).to(self.dtype)
        found[new] = self._mean[tensor_slice.slices[1:]]
        return found

    @cached_property
    def _mean(self) -> Tensor:
        inner, known = self.stored.shape[1:], self.rows.known
        total = np.zeros(inner, dtype=np.float64)
        for start in range(0, known, ROWS_PER_CHUNK):
            chunk = TensorSlice((start, *(0 for _ in inner)), (min(ROWS_PER_CHUNK, known - start), *inner))
            # numpy adds row to row in one thread, whereas the order of torch's sum depends on the number of threads.
            total += np.add.reduce(self.stored.read(chunk).double().numpy(), axis=0)
        return torch.from_numpy(np.asarray(total / known)).to(self.dtype)
