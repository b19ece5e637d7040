"""Cross-entropy of hidden states and a head that is one matrix, a chunk of logits at a time: they are never all stored.

The sum over tokens is differentiated while it is computed. For a loss that is another function of the tokens' losses,
chunks are computed again in the backward pass.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.emulate import emulated_matmuls, emulated_now
from shoal.models.head import Head, HeadInFloat8, gradient_scale, head_columns

IGNORED = -100
# The approximate maximum of elements in one chunk of logits. The CUDA kernel overwrites the logits with their gradient;
# elsewhere a chunk also needs memory for its gradient and for several fp32 temporaries.
CHUNK_LOGITS = 1 << 25
KERNEL_CHUNK_LOGITS = 1 << 28

# Tokens without a loss are left out in steps of this share of a micro-batch, so that there are few sizes of tensors.
KEPT_SIZES = 32

# From logits, labels and the size of the vocabulary: the loss of each token in fp32, and the gradient of their sum with
# respect to the logits, in their dtype and times `gradient_scale` of it. Columns beyond the vocabulary are padding:
# they have no probability, and their gradient is zero. The logits may be overwritten.
Measure = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class Chunks(NamedTuple):
    """How the logits of a micro-batch are computed."""

    measure: Measure
    most: int  # elements in a chunk
    columns: int  # logits of a token, with padding


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_kernel(tensor: Tensor) -> bool:
    """Whether there is a Triton kernel for the device of `tensor`."""
    return tensor.is_cuda and _has_triton()


def choose_chunks(weight: Tensor, measure: Measure | None, *, float8: bool = False) -> Chunks:
    """The chunks for a head's `weight` on its device. `measure`: that of a sharded vocabulary."""
    columns = head_columns(weight, float8=float8)
    if measure is not None:
        return Chunks(measure, CHUNK_LOGITS, columns)
    return Chunks(measure_full_vocabulary, KERNEL_CHUNK_LOGITS if has_kernel(weight) else CHUNK_LOGITS, columns)


def kept_tokens(labels: Tensor, loss_tokens: int | None) -> Tensor | None:
    """The indices of all loss tokens and of some others, which make up for a count of few sizes; None: of all tokens.
    `loss_tokens`: there are at most this many. A tensor on a device tells only after the host has waited for it."""
    if loss_tokens is None:
        return None
    step = -(-len(labels) // KEPT_SIZES)
    count = max(1, -(-loss_tokens // step)) * step
    return None if count >= len(labels) else torch.argsort((labels == IGNORED).byte(), stable=True)[:count]


def even_chunk(rows: int, most: int) -> int:
    """The rows per chunk, at most `most`, such that all chunks have nearly the same size."""
    return -(-rows // -(-rows // max(1, most)))


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    measure: Measure | None = None,
    rows: int | None = None,
    columns: int | None = None,
    kept: Tensor | None = None,
    float8: bool = False,
) -> Tensor:
    """The summed cross-entropy of `hidden @ weight.T`, with the logits of `rows` tokens at a time, computed with
    padding up to `columns`. `kept`: the indices of all tokens with a label, if others are to be skipped. `float8`: see
    `Float8Head`."""
    rows = rows or max(1, CHUNK_LOGITS // weight.shape[0])
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, measure or measure_full_vocabulary, rows, columns or weight.shape[0], kept, float8
    )
    return loss


def chunked_token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    measure: Measure | None = None,
    rows: int | None = None,
    columns: int | None = None,
    kept: Tensor | None = None,
    float8: bool = False,
) -> Tensor:
    """The cross-entropy of each token of `hidden @ weight.T`, with the logits of `rows` tokens at a time: for a loss
    that is not the sum of them. Arguments are those of `chunked_cross_entropy`; skipped tokens have a loss of zero."""
    rows = rows or max(1, CHUNK_LOGITS // weight.shape[0])
    losses: Tensor = _ChunkedTokenLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, measure or measure_full_vocabulary, rows, columns or weight.shape[0], kept, float8
    )
    return losses


def cross_entropy(logits: Tensor, labels: Tensor, measure: Measure | None) -> Tensor:
    """The summed loss of logits that are stored."""
    if measure is None:
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
    loss: Tensor = _MeasuredCrossEntropy.apply(logits, labels, measure)  # type: ignore[no-untyped-call]
    return loss


def token_losses(logits: Tensor, labels: Tensor, measure: Measure | None) -> Tensor:
    """The loss of each token, of logits that are stored."""
    if measure is None:
        return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="none")
    losses: Tensor = _MeasuredTokenLosses.apply(logits, labels, measure)  # type: ignore[no-untyped-call]
    return losses


def measure_full_vocabulary(logits: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy over an unsharded vocabulary of `width`."""
    if has_kernel(logits):
        from shoal.models.loss_kernel import measure_in_place

        return measure_in_place(logits, labels, width, IGNORED, gradient_scale(logits.dtype))
    padding, logits = logits.shape[1] - width, logits[:, :width]
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    counted = labels != IGNORED
    label_log_probabilities = log_probabilities.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    losses = -torch.where(counted, label_log_probabilities, 0.0)
    hit = torch.arange(width, device=logits.device) == labels[:, None]
    probabilities = log_probabilities.exp()
    factors = counted[:, None] * gradient_scale(logits.dtype)
    grad_logits = (torch.where(hit, probabilities - 1, probabilities) * factors).to(logits.dtype)
    return losses, F.pad(grad_logits, (0, padding)) if padding else grad_logits


class _MeasuredCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
        losses, grad_logits = measure(logits, labels, logits.shape[1])
        ctx.save_for_backward(grad_logits)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (grad_logits,) = ctx.saved_tensors
        outer = outer / gradient_scale(grad_logits.dtype)
        return (grad_logits.float() * outer).to(grad_logits.dtype), None, None


class _MeasuredTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
        losses, grad_logits = measure(logits, labels, logits.shape[1])
        ctx.save_for_backward(grad_logits)
        return losses

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (grad_logits,) = ctx.saved_tensors
        outer = outer[:, None] / gradient_scale(grad_logits.dtype)
        return (grad_logits.float() * outer).to(grad_logits.dtype), None, None


def _chunks(tokens: int, rows: int, kept: Tensor | None) -> list[slice | Tensor]:
    """The tokens of each chunk: slices, or indices where tokens are skipped."""
    if kept is not None:
        return list(torch.split(kept, rows))
    return [slice(start, start + rows) for start in range(0, tokens, rows)]


def _empty_gradient(hidden: Tensor, kept: Tensor | None) -> Tensor:
    return torch.empty_like(hidden) if kept is None else torch.zeros_like(hidden)


def _add_matmul(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total + left @ right` in fp32; `total` is updated in place."""
    if not left.is_cuda or left.dtype == torch.float32:
        product = left @ right
        return product.float() if total is None else total.add_(product)
    # Accumulated in fp32 inside the matmul, without a low-precision result.
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _scale_and_cast(large: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in fp32 and cast, without an fp32 temporary. Not in place: a zero-bubble schedule runs the same node
    twice."""
    if has_kernel(large):
        from shoal.models.loss_kernel import scale_and_cast

        return scale_and_cast(large, factor, dtype)
    return torch.mul(large, factor, out=torch.empty_like(large, dtype=dtype))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes the gradients in the forward pass, while a chunk's logits exist, to compute the logits only once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        measure: Measure,
        rows: int,
        columns: int,
        kept: Tensor | None,
        float8: bool,
    ) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        hidden_gradient = _empty_gradient(hidden, kept) if wants_hidden else None
        weight_gradient: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        width, head = weight.shape[0], (HeadInFloat8 if float8 else Head)(weight, columns)
        for here in _chunks(len(hidden), rows, kept):
            part = hidden[here]
            losses, grad_logits = measure(head.logits(part), labels[here], width)
            total += losses.sum()
            if hidden_gradient is not None:
                head.store_hidden_gradient(hidden_gradient, here, grad_logits)
            if wants_weight:  # accumulated over chunks in fp32, as inside one large matmul
                weight_gradient = _add_matmul(weight_gradient, grad_logits.T, part)
            del grad_logits  # frees it before the next chunk's logits are computed
        if weight_gradient is not None:
            weight_gradient = weight_gradient[:width]
        ctx.save_for_backward(*(gradient for gradient in (hidden_gradient, weight_gradient) if gradient is not None))
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        saved = list(ctx.saved_tensors)
        hidden = saved.pop(0) if ctx.needs_input_grad[0] else None
        weight = saved.pop(0) if ctx.needs_input_grad[1] else None
        outer = outer / gradient_scale(ctx.weight_dtype)
        # Multiplied in fp32: casting `outer` to bf16 first would change every gradient by up to 0.4%.
        return (
            None if hidden is None else (hidden.float() * outer).to(hidden.dtype),
            None if weight is None else _scale_and_cast(weight, outer, ctx.weight_dtype),
            *(None,) * 6,
        )


class _ChunkedTokenLosses(torch.autograd.Function):
    """Computes the logits of a chunk twice: in the forward pass for the losses, and in the backward pass, where the
    weight of each token in the final loss is known, for the gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        measure: Measure,
        rows: int,
        columns: int,
        kept: Tensor | None,
        float8: bool,
    ) -> Tensor:
        losses = torch.zeros(len(hidden), dtype=torch.float32, device=hidden.device)
        ctx.make_head = partial(HeadInFloat8 if float8 else Head, columns=columns)
        head = ctx.make_head(weight)
        for here in _chunks(len(hidden), rows, kept):
            losses[here] = measure(head.logits(hidden[here]), labels[here], weight.shape[0])[0]
        ctx.save_for_backward(hidden, weight, labels, kept)  # the head is made again in the backward pass
        ctx.measure, ctx.rows, ctx.emulated = measure, rows, emulated_now()
        return losses

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, kept = ctx.saved_tensors
        rows, (wants_hidden, wants_weight) = ctx.rows, ctx.needs_input_grad[:2]
        hidden_gradient = _empty_gradient(hidden, kept) if wants_hidden else None
        weight_gradient: Tensor | None = None
        width, head = weight.shape[0], ctx.make_head(weight)
        with emulated_matmuls(ctx.emulated):
            for here in _chunks(len(hidden), rows, kept):
                part = hidden[here]
                factors: Tensor | None = outer[here, None]
                if hidden.dtype == torch.float16:
                    # The smallest gradients would underflow before they are multiplied by the loss scale.
                    grad_logits = ctx.measure(head.logits(part).float(), labels[here], width)[1]
                    grad_logits, factors = grad_logits.mul_(factors).to(hidden.dtype), None
                else:
                    grad_logits = ctx.measure(head.logits(part), labels[here], width)[1]
                # Else the factors are applied to hidden states and their gradient, which are narrower than logits.
                if hidden_gradient is not None:
                    head.store_hidden_gradient(hidden_gradient, here, grad_logits)
                    if factors is not None:
                        hidden_gradient[here] *= factors
                if wants_weight:
                    scaled = part if factors is None else (part * factors).to(part.dtype)
                    weight_gradient = _add_matmul(weight_gradient, grad_logits.T, scaled)
                del grad_logits  # frees it before the next chunk's logits are computed
        cast = None if weight_gradient is None else weight_gradient[:width].to(weight.dtype)
        return hidden_gradient, cast, *(None,) * 7
