"""The loss, inside the module that is wrapped and sharded: a micro-batch in, (loss sum, target count) out.

It lives inside so that the head's weight is gathered with its module, so that a chunked loss never stores all logits,
and so that the last stage of a pipeline is this same module.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from shoal.models.anatomy import Anatomy
from shoal.models.attention import document_mask, masks_itself
from shoal.models.flex import document_blocks

IGNORED = -100
# Chunks are sized so that one chunk of logits holds at most about this many numbers. For CUDA's kernel they are in
# memory once; elsewhere as they are, as their slope, and in between several times in fp32.
CHUNK_LOGITS = 1 << 25
KERNEL_CHUNK_LOGITS = 1 << 28

# Modules of transformers that add what matrices give to a tensor like what they were given, in place, which takes one
# type: they are given rounded numbers.
OF_ONE_TYPE = ("DbrxExperts",)

# From logits and labels: the summed loss in fp32, and its slope with respect to the logits, in their type. The chunked
# loss has no more use for the logits: their place may be taken.
Measure = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class MicroBatch(Protocol):
    """What the loss needs of a micro-batch; labels are already shifted, and IGNORED where there is no target."""

    inputs: Tensor
    labels: Tensor
    positions: Tensor | None
    documents: Tensor | None
    mask: Tensor | None  # who sees whom, where that does not follow from `documents`


def choose_loss(wanted: str, anatomy: Anatomy, tokens: int, vocabulary: int) -> str:
    """`auto`: in chunks where all logits of a pass at once would be large and the head allows it."""
    if wanted != "auto":
        return wanted if anatomy.linear_head else "plain"
    return "chunked" if anatomy.linear_head and tokens * vocabulary > CHUNK_LOGITS else "plain"


class LanguageModel(nn.Module):
    """A causal language model with its loss. `model` is the transformers model, whose names checkpoints use.

    `measure` is given where this process has a part of the vocabulary only; with `skips_tiles` masks are made for flex
    attention; `rounded` is the type of matrices that are not in the type of what goes from block to block.
    """

    def __init__(
        self,
        model: Any,
        anatomy: Anatomy,
        loss: str,
        measure: Measure | None = None,
        *,
        skips_tiles: bool = False,
        rounded: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.anatomy = anatomy
        self.skips_tiles = skips_tiles
        self.end = HeadAndLoss(model.get_submodule(anatomy.head), loss, measure)
        self.rounded = rounded
        if rounded is not None:
            model.get_submodule(anatomy.embedding).register_forward_hook(_widen)
            for module in model.modules():
                if type(module).__name__ in OF_ONE_TYPE:
                    module.register_forward_pre_hook(partial(_round_inputs, rounded))

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        inputs = {"input_ids": batch.inputs, **self.surroundings(batch)}
        if self.anatomy.linear_head:
            loss = self.end(self.hidden(inputs), batch.labels)
        else:
            with self._rounding(batch.inputs.device):
                logits = self.model(**inputs).logits
            loss = self.end.loss_of_logits(logits, batch.labels)
        return loss, (batch.labels != IGNORED).sum()

    def surroundings(self, batch: MicroBatch) -> dict[str, Any]:
        """What the model is given beside the tokens: where each stands, and which others it sees."""
        settings = self.model.config.get_text_config()
        mask: Tensor | BlockMask | None = batch.mask
        if mask is None and batch.documents is not None and not masks_itself(settings):
            mask = document_blocks(batch.documents) if self.skips_tiles else document_mask(batch.documents)
        found: dict[str, Any] = {"use_cache": False}
        if mask is not None:
            # Eager attention adds its mask to the scores.
            if isinstance(mask, Tensor) and settings._attn_implementation == "eager":
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
            found["attention_mask"] = mask
        if batch.positions is not None:
            found["position_ids"] = batch.positions
        return found

    def hidden(self, inputs: dict[str, Any]) -> Tensor:
        """What the backbone makes of `inputs`."""
        with self._rounding(next(one.device for one in inputs.values() if isinstance(one, Tensor))):
            result: Tensor = self.model.get_submodule(self.anatomy.backbone)(**inputs).last_hidden_state
        return result

    def _rounding(self, device: torch.device) -> AbstractContextManager[None]:
        """What is not a product of matrices, or made of one, is computed in fp32."""
        if self.rounded is None:
            return nullcontext()
        return torch.autocast(device.type, self.rounded, cache_enabled=False)


class HeadAndLoss(nn.Module):
    """Hidden states in, the summed loss out, through a head that is one matrix.

    A module of its own, which whoever shards the model can wrap: the head's weight is used in here alone, by a chunked
    loss without a call of the head.
    """

    def __init__(self, head: Any, loss: str, measure: Measure | None) -> None:
        super().__init__()
        self.head = head  # the model's own; here too, because what is inside is what sharding wraps
        self.loss = loss
        self.measure = measure

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        head = self.head
        hidden = hidden.to(head.weight.dtype)
        if self.loss == "plain":
            return self.loss_of_logits(head(hidden), labels)
        measure, most = self.chunks(hidden)
        # Chunks are sized by the whole vocabulary, so that ranks with uneven parts of it meet in the same exchanges.
        rows = even_chunk(hidden.shape[0] * hidden.shape[1], most // int(head.out_features))
        return chunked_cross_entropy(hidden.flatten(0, 1), head.weight, labels.flatten(), measure, rows)

    def chunks(self, hidden: Tensor) -> tuple[Measure, int]:
        """How a chunk of logits is measured where `hidden` is, and how many of them it holds at most."""
        if self.measure is not None:
            return self.measure, CHUNK_LOGITS
        return measure_whole, KERNEL_CHUNK_LOGITS if has_kernel(hidden) else CHUNK_LOGITS

    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits, labels = logits.flatten(0, 1), labels.flatten()
        if self.measure is None:
            return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED, reduction="sum")
        loss: Tensor = _MeasuredCrossEntropy.apply(logits, labels, self.measure)  # type: ignore[no-untyped-call]
        return loss


def _widen(module: nn.Module, given: Any, found: Tensor) -> Tensor:
    return found.float()


def _round_inputs(dtype: torch.dtype, module: nn.Module, given: Any) -> Any:
    return tuple(one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for one in given)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def has_kernel(tensor: Tensor) -> bool:
    """Whether the loss is a kernel where `tensor` is."""
    return tensor.is_cuda and _has_triton()


def even_chunk(rows: int, most: int) -> int:
    """Rows of a chunk, so that chunks have at most `most` and the last has nearly as many as the others."""
    return -(-rows // -(-rows // max(1, most)))


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, measure: Measure | None = None, rows: int | None = None
) -> Tensor:
    """The summed cross-entropy of `hidden @ weight.T`, logits made and dropped `rows` at a time."""
    rows = rows or max(1, CHUNK_LOGITS // weight.shape[0])
    loss: Tensor = _ChunkedCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, labels, measure or measure_whole, rows
    )
    return loss


def measure_whole(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy over a vocabulary that is all here."""
    if has_kernel(logits):
        from shoal.models.loss_kernel import measure_in_place

        return measure_in_place(logits, labels, IGNORED)
    logarithms = torch.log_softmax(logits.float(), dim=-1)
    counted = labels != IGNORED
    target = logarithms.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    loss = -torch.where(counted, target, 0.0).sum()
    hit = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    shares = logarithms.exp()
    return loss, (torch.where(hit, shares - 1, shares) * counted[:, None]).to(logits.dtype)


class _MeasuredCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, measure: Measure) -> Tensor:
        loss, grad_logits = measure(logits, labels)
        ctx.save_for_backward(grad_logits)
        return loss

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, None, None]:
        (grad_logits,) = ctx.saved_tensors
        return (grad_logits.float() * outer).to(grad_logits.dtype), None, None


def _plus_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total` and a matrix product, in fp32; `total` is changed."""
    if not left.is_cuda or left.dtype == torch.float32:
        product = left @ right
        return product.float() if total is None else total.add_(product)
    # Summed where the products are, without a rounded copy of them.
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _multiplied(large: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiplied in fp32 and rounded in one go: `large` is not copied in fp32, nor changed in place, because a
    zero-bubble pipeline comes back to the same node a second time."""
    if has_kernel(large):
        from shoal.models.loss_kernel import multiplied

        return multiplied(large, factor, dtype)
    return torch.mul(large, factor, out=torch.empty_like(large, dtype=dtype))


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Makes the gradients in the forward pass, while a chunk's logits exist, instead of making the logits twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, measure: Measure, rows: int) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        weight_gradient: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part, target = hidden[start : start + rows], labels[start : start + rows]
            loss, grad_logits = measure(part @ weight.T, target)
            total += loss
            if hidden_gradient is not None:
                torch.matmul(grad_logits, weight, out=hidden_gradient[start : start + rows])
            if wants_weight:  # summed over chunks in fp32, as one large matrix product would do inside
                weight_gradient = _plus_product(weight_gradient, grad_logits.T, part)
            del grad_logits  # or it would still be there while the next chunk's logits are made
        ctx.save_for_backward(*(gradient for gradient in (hidden_gradient, weight_gradient) if gradient is not None))
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        saved = list(ctx.saved_tensors)
        hidden = saved.pop(0) if ctx.needs_input_grad[0] else None
        weight = saved.pop(0) if ctx.needs_input_grad[1] else None
        # Multiplied in fp32: rounding `outer` to bf16 first would bend every gradient by up to 0.4%.
        return (
            None if hidden is None else (hidden.float() * outer).to(hidden.dtype),
            None if weight is None else _multiplied(weight, outer, ctx.weight_dtype),
            None,
            None,
            None,
        )
