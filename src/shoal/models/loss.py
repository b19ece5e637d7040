"""The loss, inside the module that is wrapped and sharded: a micro-batch in, (loss sum, target count) out.

It lives inside so that the head's weight is gathered with its module, so that a chunked loss never stores all logits,
and so that the last stage of a pipeline is this same module.
"""

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models.anatomy import Anatomy
from shoal.models.attention import document_mask, masks_itself

IGNORED = -100
# Chunks are sized so that one chunk of logits holds about this many numbers (fp32: 128 MiB).
CHUNK_LOGITS = 1 << 25


class MicroBatch(Protocol):
    """What the loss needs of a micro-batch; labels are already shifted, and IGNORED where there is no target."""

    inputs: Tensor
    labels: Tensor
    positions: Tensor | None
    documents: Tensor | None


def choose_loss(wanted: str, anatomy: Anatomy, tokens: int, vocabulary: int) -> str:
    """`auto`: in chunks where all logits of a pass at once would be large and the head allows it."""
    if wanted != "auto":
        return wanted if anatomy.linear_head else "plain"
    return "chunked" if anatomy.linear_head and tokens * vocabulary > CHUNK_LOGITS else "plain"


class LanguageModel(nn.Module):
    """A causal language model with its loss. `model` is the transformers model, whose names checkpoints use."""

    def __init__(self, model: Any, anatomy: Anatomy, loss: str) -> None:
        super().__init__()
        self.model = model
        self.anatomy = anatomy
        self.loss = loss

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        inputs: dict[str, Any] = {"input_ids": batch.inputs, "use_cache": False}
        if batch.positions is not None:
            inputs["position_ids"] = batch.positions
        settings = self.model.config.get_text_config()
        if batch.documents is not None and not masks_itself(settings):
            mask = document_mask(batch.documents)
            if settings._attn_implementation == "eager":  # which adds its mask to the scores
                mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, torch.finfo(torch.float32).min)
            inputs["attention_mask"] = mask
        if self.loss == "plain":
            logits = self.model(**inputs).logits
            loss = F.cross_entropy(
                logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED, reduction="sum"
            )
        else:
            hidden = self.model.get_submodule(self.anatomy.backbone)(**inputs).last_hidden_state
            weight = self.model.get_submodule(self.anatomy.head).weight
            loss = chunked_cross_entropy(hidden.flatten(0, 1), weight, batch.labels.flatten())
        return loss, (batch.labels != IGNORED).sum()


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """The summed cross-entropy of `hidden @ weight.T`, logits made and dropped a chunk at a time."""
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Makes the gradients in the forward pass, while a chunk's logits exist, instead of making the logits twice."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        # Summed over chunks in fp32, as one large matrix product would do inside.
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        rows = max(1, CHUNK_LOGITS // weight.shape[0])
        for start in range(0, hidden.shape[0], rows):
            part, target = hidden[start : start + rows], labels[start : start + rows]
            logits = (part @ weight.T).float()
            logarithms = torch.log_softmax(logits, dim=-1)
            total += F.nll_loss(logarithms, target, ignore_index=IGNORED, reduction="sum")
            if not (wants_hidden or wants_weight):
                continue
            counted = (target != IGNORED)[:, None]
            slope = logarithms.exp_()
            slope.scatter_add_(1, target.clamp_min(0)[:, None], torch.full_like(slope[:, :1], -1.0))
            slope = (slope * counted).to(part.dtype)
            if hidden_gradient is not None:
                torch.matmul(slope, weight, out=hidden_gradient[start : start + rows])
            if weight_gradient is not None:
                weight_gradient += slope.T @ part
        ctx.save_for_backward(*(gradient for gradient in (hidden_gradient, weight_gradient) if gradient is not None))
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        saved = list(ctx.saved_tensors)
        hidden = saved.pop(0) if ctx.needs_input_grad[0] else None
        weight = saved.pop(0) if ctx.needs_input_grad[1] else None
        # Multiplied in fp32: rounding `outer` to bf16 first would bend every gradient by up to 0.4%.
        return (
            None if hidden is None else (hidden.float() * outer).to(hidden.dtype),
            None if weight is None else (weight * outer).to(ctx.weight_dtype),
            None,
        )
