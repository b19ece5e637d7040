"""The weight of a head in the matmuls of its loss: logits, and the gradient of hidden states."""

import torch
from torch import Tensor

from shoal.models.float8 import MULTIPLE, Float8Head

# Tensor cores read rows of a multiple of this many bytes; for others there are slow kernels only.
ALIGNED_BYTES = 16
# A vocabulary that is not aligned, as GPT-2's of 50,257, is padded to a multiple of this: whole tiles of a matmul.
VOCABULARY_MULTIPLE = 128
# Most gradients of logits are the probabilities of tokens that did not occur: in fp16, whose smallest normal number is
# 6e-5, they are stored times this. Their sums over the vocabulary overflow only with weights beyond 100.
FP16_GRADIENT_SCALE = 256.0


def head_columns(weight: Tensor, *, float8: bool = False) -> int:
    """The logits of a token that are computed from a head's `weight`, with padding."""
    columns = padded_vocabulary(weight) if weight.is_cuda else weight.shape[0]
    return _next_multiple(columns, VOCABULARY_MULTIPLE) if float8 and columns % MULTIPLE else columns


def padded_vocabulary(weight: Tensor) -> int:
    """The rows of a head's `weight` with which its three matmuls run on tensor cores. They never do in fp32."""
    rows, itemsize = weight.shape[0], weight.dtype.itemsize
    if itemsize > 2 or rows * itemsize % ALIGNED_BYTES == 0:
        return rows
    return _next_multiple(rows, VOCABULARY_MULTIPLE)


def _next_multiple(count: int, of: int) -> int:
    return -(-count // of) * of


def gradient_scale(dtype: torch.dtype) -> float:
    """The factor of gradients of logits in `dtype`; they are divided by it where the loss scale is known."""
    return FP16_GRADIENT_SCALE if dtype == torch.float16 else 1.0


def _pad_rows(weight: Tensor, rows: int) -> Tensor:
    """`weight` with zeros appended: the logits of these rows are zero, and add nothing to a gradient."""
    if rows == weight.shape[0]:
        return weight
    padded = weight.new_empty(rows, weight.shape[1])
    padded[: weight.shape[0]] = weight
    padded[weight.shape[0] :] = 0
    return padded


class Head:
    """The head's weight, padded to `columns` rows, as a factor of two matmuls."""

    def __init__(self, weight: Tensor, columns: int) -> None:
        self.weight = _pad_rows(weight, columns)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T

    def store_hidden_gradient(self, target: Tensor, here: slice | Tensor, grad_logits: Tensor) -> None:
        if isinstance(here, slice):
            torch.matmul(grad_logits, self.weight, out=target[here])
        else:
            target.index_copy_(0, here, grad_logits @ self.weight)


class HeadInFloat8:
    """The same with float8 matmuls."""

    def __init__(self, weight: Tensor, columns: int) -> None:
        self.matrix = Float8Head(_pad_rows(weight, columns))

    def logits(self, hidden: Tensor) -> Tensor:
        return self.matrix.logits(hidden)

    def store_hidden_gradient(self, target: Tensor, here: slice | Tensor, grad_logits: Tensor) -> None:
        target[here] = self.matrix.hidden_gradient(grad_logits, largest=gradient_scale(grad_logits.dtype))
