"""The loss, as part of the module that FSDP or DDP wraps: from a micro-batch to `LossSums`.

It is inside so that FSDP gathers the head's weight for it, so that a chunked loss never stores all logits, and so that
the last pipeline stage is the same module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.attention import added_to_scores, packed_mask
from shoal.models.emulate import emulated_matmuls, emulated_now
from shoal.models.flex import document_blocks

IGNORED = -100
# The approximate maximum of elements in one chunk of logits. The CUDA kernel overwrites the logits with their gradient;
# elsewhere a chunk also needs memory for its gradient and for several fp32 temporaries.
CHUNK_LOGITS = 1 << 25
KERNEL_CHUNK_LOGITS = 1 << 28

# Modules of transformers that add the output of a matmul in place to a tensor with the dtype of their input, which must
# be the same dtype: their inputs are cast.
SINGLE_DTYPE = ("DbrxExperts",)

# From logits and labels: the loss of each token in fp32, and the gradient of their sum with respect to the logits, in
# their dtype. The logits may be overwritten.
Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class MicroBatch(Protocol):
    """What the loss needs of a micro-batch. Labels are already shifted, and IGNORED at tokens without a loss."""

    inputs: Tensor
    labels: Tensor
    positions: Tensor | None
    documents: Tensor | None
    mask: Tensor | None  # the attention mask, where it does not follow from `documents`
    reference: Tensor | None  # of pairs: see `data.loader.MicroBatch`


class LossSums(NamedTuple):
    """What the module computes from a micro-batch."""

    trained: Tensor  # the loss that is differentiated: the sum over all labels, and auxiliary losses
    # Scalars to add up over micro-batches and ranks: the loss without auxiliary ones, the weight by which it is divided
    # (the number of loss tokens, or of examples), and what else the objective's metrics need.
    sums: tuple[Tensor, ...]


class LossFactory(Protocol):
    """Makes the module with the loss: an objective, as far as parallelism needs it (see `objectives.objective`)."""

    @property
    def sums(self) -> tuple[str, ...]: ...

    def module(
        self,
        model: Any,
        anatomy: Anatomy,
        loss: str,
        measure: "Measure | None" = None,
        *,
        skips_tiles: bool = False,
        matmul_dtype: torch.dtype | None = None,
    ) -> "LanguageModel": ...


def choose_loss(wanted: str, anatomy: Anatomy, tokens: int, vocabulary: int) -> str:
    """`auto`: chunked if the logits of a micro-batch would be large and the head is a single matrix."""
    if wanted != "auto":
        return wanted if anatomy.linear_head else "plain"
    return "chunked" if anatomy.linear_head and tokens * vocabulary > CHUNK_LOGITS else "plain"


class LanguageModel(nn.Module):
    """A language model with the cross-entropy of its labels. `model` is the transformers model, whose names checkpoints
    use. An objective with another loss derives a class from this one and overrides `losses`, and `losses_of_logits` if
    it supports heads that are more than one matrix.

    `measure`: the cross-entropy, where this rank has only a shard of the vocabulary. `skips_tiles`: make masks for flex
    attention. `matmul_dtype`: the dtype of the matrices, if it is not that of the residual stream.
    """

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        loss: str,
        measure: Measure | None = None,
        *,
        skips_tiles: bool = False,
        matmul_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        overridden = type(self).losses is not LanguageModel.losses
        if overridden and not anatomy.linear_head and type(self).losses_of_logits is LanguageModel.losses_of_logits:
            raise UserMistake(
                f"The objective needs a head that is a single linear layer, which {type(model).__name__} does not have."
            )
        self.model = model
        self.anatomy = anatomy
        self.skips_tiles = skips_tiles
        # The ranks that have the other shards of each sequence, for a loss that is not a sum over tokens.
        self.sequence_group: dist.ProcessGroup | None = None
        self.head_and_loss = HeadAndLoss(model.get_submodule(anatomy.head), loss, measure)
        self.matmul_dtype = matmul_dtype
        if matmul_dtype is not None:
            model.get_submodule(anatomy.embedding).register_forward_hook(_cast_output_to_fp32)
            for module in model.modules():
                if type(module).__name__ in SINGLE_DTYPE:
                    module.register_forward_pre_hook(partial(_cast_inputs, matmul_dtype))

    def forward(self, batch: MicroBatch) -> LossSums:
        inputs = {"input_ids": batch.inputs, **self.model_kwargs(batch)}
        if self.anatomy.linear_head:
            return self.losses(self.hidden(inputs), batch)
        return self.losses_of_logits(self.logits(inputs), batch)

    def losses_of_logits(self, logits: Tensor, batch: MicroBatch) -> LossSums:
        """As `losses`, where the head is more than one matrix."""
        return _over_tokens(self.head_and_loss.loss_of_logits(logits, batch.labels), batch.labels)

    def losses(self, hidden: Tensor, batch: MicroBatch) -> LossSums:
        """From the last hidden states to the loss. A sequence whose labels are all IGNORED adds nothing. In the last
        stage of a pipeline, `batch.inputs` are hidden states too."""
        return _over_tokens(self.head_and_loss(hidden, batch.labels), batch.labels)

    def model_kwargs(self, batch: MicroBatch) -> dict[str, Any]:
        """The keyword arguments of the model beside the tokens: position ids and attention mask."""
        settings = self.model.config.get_text_config()
        mask: Tensor | BlockMask | dict[str, Tensor] | None = batch.mask
        if mask is None and batch.documents is not None:
            mask = document_blocks(batch.documents) if self.skips_tiles else packed_mask(settings, batch.documents)
        found: dict[str, Any] = {"use_cache": False}
        if mask is not None:
            if settings._attn_implementation == "eager":
                assert not isinstance(mask, BlockMask), "flex attention is not eager"
                mask = (
                    {kind: added_to_scores(one) for kind, one in mask.items()}
                    if isinstance(mask, dict)
                    else added_to_scores(mask)
                )
            found["attention_mask"] = mask
        if batch.positions is not None:
            found["position_ids"] = batch.positions
        return found

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """The last hidden state of the backbone."""
        with self._autocast(next(one.device for one in inputs.values() if isinstance(one, Tensor))):
            result: Tensor = self.model.get_submodule(self.anatomy.backbone)(**inputs).last_hidden_state
        return result

    def logits(self, inputs: dict[str, Any]) -> Tensor:
        """The logits of the model, where the head is more than one matrix."""
        with self._autocast(inputs["input_ids"].device):
            result: Tensor = self.model(**inputs).logits
        return result

    def _autocast(self, device: torch.device) -> AbstractContextManager[None]:
        """Matmuls in `matmul_dtype`, everything else in the dtype of its inputs or in fp32."""
        if self.matmul_dtype is None:
            return nullcontext()
        return torch.autocast(device.type, self.matmul_dtype, cache_enabled=False)


class HeadAndLoss(nn.Module):
    """From hidden states to the summed loss, through a head that is a single matrix.

    A module of its own so that FSDP can wrap it: the head's weight is used only here, and a chunked loss uses it
    without calling the head.
    """

    def __init__(self, head: Any, loss: str, measure: Measure | None) -> None:
        super().__init__()
        self.head = head  # the model's own; also registered here, so that FSDP shards it with this module
        self.loss = loss
        self.measure = measure

    def forward(self, hidden: Tensor, labels: Tensor, *, per_token: bool = False) -> Tensor:
        """The sum of the losses or, `per_token`, each of them, in the shape of `labels` and 0 where they are
        IGNORED."""
        head = self.head
        hidden = hidden.to(head.weight.dtype)
        if self.loss == "plain":
            logits = head(hidden)
            return self.losses_of_logits(logits, labels) if per_token else self.loss_of_logits(logits, labels)
        measure, most = self.chunks(hidden)
        # Chunks are sized by the full vocabulary, so that ranks with uneven shards of it issue the same collectives.
        rows = even_chunk(hidden.shape[0] * hidden.shape[1], most // int(head.out_features))
        compute = chunked_token_losses if per_token else chunked_cross_entropy
        found = compute(hidden.flatten(0, 1), head.weight, labels.flatten(), measure, rows)
        return found.view_as(labels) if per_token else found

    def chunks(self, hidden: Tensor) -> tuple[Measure, int]:
        """The cross-entropy of a chunk of logits on the device of `hidden`, and the maximum of elements in a chunk."""
        if self.measure is not None:
            return self.measure, CHUNK_LOGITS
        return measure_full_vocabulary, KERNEL_CHUNK_LOGITS if has_kernel(hidden) else CHUNK_LOGITS

    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.measure is None:
            return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        loss: Tensor = _MeasuredCrossEntropy.apply(logits, labels, self.measure)  # type: ignore[no-untyped-call]
        return loss

    def losses_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token."""
        rows = logits.flatten(0, 1)
        if self.measure is None:
            found = F.cross_entropy(rows.float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        else:
            found = _MeasuredTokenLosses.apply(rows, labels.flatten(), self.measure)  # type: ignore[no-untyped-call]
        return found.view_as(labels)


def _over_tokens(loss: Tensor, labels: Tensor) -> LossSums:
    return LossSums(loss, (loss.detach(), (labels != IGNORED).sum()))


def _cast_output_to_fp32(module: nn.Module, given: Any, found: Tensor) -> Tensor:
    return found.float()


def _cast_inputs(dtype: torch.dtype, module: nn.Module, given: Any) -> Any:
    return tuple(one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for one in given)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_kernel(tensor: Tensor) -> bool:
    """Whether there is a Triton kernel for the device of `tensor`."""
    return tensor.is_cuda and _has_triton()


def even_chunk(rows: int, most: int) -> int:
    """The rows per chunk, at most `most`, such that all chunks have nearly the same size."""
    return -(-rows // -(-rows // max(1, most)))


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, measure: Measure | None = None, rows: int | None = None
) -> Tensor:
    """The summed cross-entropy of `hidden @ weight.T`, with the logits of `rows` tokens at a time."""
    rows = rows or max(1, CHUNK_LOGITS // weight.shape[0])
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, measure or measure_full_vocabulary, rows
    )
    return loss


def chunked_token_losses(
    hidden: Tensor, weight: Tensor, labels: Tensor, measure: Measure | None = None, rows: int | None = None
) -> Tensor:
    """The cross-entropy of each token of `hidden @ weight.T`, with the logits of `rows` tokens at a time: for a loss
    that is not the sum of them."""
    rows = rows or max(1, CHUNK_LOGITS // weight.shape[0])
    losses: Tensor = _ChunkedTokenLosses.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, measure or measure_full_vocabulary, rows
    )
    return losses


def measure_full_vocabulary(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy over an unsharded vocabulary."""
    if has_kernel(logits):
        from shoal.models.loss_kernel import measure_in_place

        return measure_in_place(logits, labels, IGNORED)
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    counted = labels != IGNORED
    label_log_probabilities = log_probabilities.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    losses = -torch.where(counted, label_log_probabilities, 0.0)
    hit = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    probabilities = log_probabilities.exp()
    return losses, (torch.where(hit, probabilities - 1, probabilities) * counted[:, None]).to(logits.dtype)


class _MeasuredCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
        losses, grad_logits = measure(logits, labels)
        ctx.save_for_backward(grad_logits)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (grad_logits,) = ctx.saved_tensors
        return (grad_logits.float() * outer).to(grad_logits.dtype), None, None


class _MeasuredTokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
        losses, grad_logits = measure(logits, labels)
        ctx.save_for_backward(grad_logits)
        return losses

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (grad_logits,) = ctx.saved_tensors
        return (grad_logits.float() * outer[:, None]).to(grad_logits.dtype), None, None


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
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, measure: Measure, rows: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part, part_labels = hidden[start : start + rows], labels[start : start + rows]
            losses, grad_logits = measure(part @ weight.T, part_labels)
            total += losses.sum()
            if hidden_gradient is not None:
                torch.matmul(grad_logits, weight, out=hidden_gradient[start : start + rows])
            if wants_weight:  # accumulated over chunks in fp32, as inside one large matmul
                weight_gradient = _add_matmul(weight_gradient, grad_logits.T, part)
            del grad_logits  # frees it before the next chunk's logits are computed
        ctx.save_for_backward(*(gradient for gradient in (hidden_gradient, weight_gradient) if gradient is not None))
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        saved = list(ctx.saved_tensors)
        hidden = saved.pop(0) if ctx.needs_input_grad[0] else None
        weight = saved.pop(0) if ctx.needs_input_grad[1] else None
        # Multiplied in fp32: casting `outer` to bf16 first would change every gradient by up to 0.4%.
        return (
            None if hidden is None else (hidden.float() * outer).to(hidden.dtype),
            None if weight is None else _scale_and_cast(weight, outer, ctx.weight_dtype),
            None,
            None,
            None,
        )


class _ChunkedTokenLosses(torch.autograd.Function):
    """Computes the logits of a chunk twice: in the forward pass for the losses, and in the backward pass, where the
    weight of each token in the final loss is known, for the gradients."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, measure: Measure, rows: int) -> Tensor:
        starts = range(0, hidden.shape[0], rows)
        losses = torch.cat(
            [measure(hidden[one : one + rows] @ weight.T, labels[one : one + rows])[0] for one in starts]
        )
        ctx.save_for_backward(hidden, weight, labels)
        ctx.measure, ctx.rows, ctx.emulated = measure, rows, emulated_now()
        return losses

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels = ctx.saved_tensors
        rows, (wants_hidden, wants_weight) = ctx.rows, ctx.needs_input_grad[:2]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient: Tensor | None = None
        with emulated_matmuls(ctx.emulated):
            for start in range(0, hidden.shape[0], rows):
                here = slice(start, start + rows)
                part = hidden[here]
                factors: Tensor | None = outer[here, None]
                if hidden.dtype == torch.float16:
                    # The smallest gradients would underflow before they are multiplied by the loss scale.
                    grad_logits = ctx.measure((part @ weight.T).float(), labels[here])[1]
                    grad_logits, factors = grad_logits.mul_(factors).to(hidden.dtype), None
                else:
                    grad_logits = ctx.measure(part @ weight.T, labels[here])[1]
                # Else the factors are applied to hidden states and their gradient, which are narrower than logits.
                if hidden_gradient is not None:
                    torch.matmul(grad_logits, weight, out=hidden_gradient[here])
                    if factors is not None:
                        hidden_gradient[here] *= factors
                if wants_weight:
                    scaled = part if factors is None else (part * factors).to(part.dtype)
                    weight_gradient = _add_matmul(weight_gradient, grad_logits.T, scaled)
                del grad_logits  # frees it before the next chunk's logits are computed
        cast = None if weight_gradient is None else weight_gradient.to(weight.dtype)
        return hidden_gradient, cast, None, None, None
