"""The loss, as part of the module that FSDP or DDP wraps: from a micro-batch to `LossSums`.

It is inside so that FSDP gathers the head's weight for it, so that a chunked loss never stores all logits, and so that
the last pipeline stage is the same module.
"""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.attention import Masks, added_to_scores, packed_mask, window_masks, window_within
from shoal.models.cross_entropy import (
    CHUNK_LOGITS,
    IGNORED,
    Chunks,
    Measure,
    choose_chunks,
    chunked_cross_entropy,
    chunked_token_losses,
    cross_entropy,
    even_chunk,
    kept_tokens,
    token_losses,
)

# Modules of transformers that add the output of a matmul in place to a tensor with the dtype of their input, which must
# be the same dtype: their inputs are cast.
SINGLE_DTYPE = ("DbrxExperts",)


class MicroBatch(Protocol):
    """What the loss needs of a micro-batch. Labels are already shifted, and IGNORED at tokens without a loss."""

    inputs: Tensor
    labels: Tensor
    positions: Tensor | None
    documents: Tensor | None
    mask: Tensor | None  # the attention mask, where it does not follow from `documents`
    loss_tokens: int | None  # at most this many labels are not IGNORED; None: unknown
    reference: Tensor | None  # of pairs: see `data.loader.MicroBatch`
    values: Tensor | None  # of an encoder's tokens


class LossSums(NamedTuple):
    """What the module computes from a micro-batch."""

    trained: Tensor  # the loss that is differentiated: the sum over all labels, and auxiliary losses
    # Numbers to add up over micro-batches and ranks, in scalars and vectors: the loss without auxiliary ones, the
    # weight by which it is divided (the number of loss tokens, or of examples), and what else the metrics need.
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
        self.windows_in_tiles = False  # flex attention also for sequences that are one document
        self._windows: dict[tuple[int, torch.device], Masks] = {}
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
        return _over_tokens(self.head_and_loss(hidden, batch.labels, loss_tokens=batch.loss_tokens), batch.labels)

    def model_kwargs(self, batch: MicroBatch) -> dict[str, Any]:
        """The keyword arguments of the model beside the tokens: position ids and attention mask."""
        settings = self.model.config.get_text_config()
        mask: Masks | None = batch.mask
        if mask is None and batch.documents is not None:
            mask = packed_mask(settings, batch.documents, tiles=self.skips_tiles)
        elif mask is None and self.windows_in_tiles:
            mask = self._window_masks(settings, batch.labels)
        found: dict[str, Any] = {"use_cache": False}
        if mask is not None:
            if settings._attn_implementation == "eager":
                mask = (
                    {kind: None if one is None else added_to_scores(one) for kind, one in mask.items()}
                    if isinstance(mask, dict)
                    else added_to_scores(mask)
                )
            found["attention_mask"] = mask
        if batch.positions is not None:
            found["position_ids"] = batch.positions
        return found

    def _window_masks(self, settings: Any, labels: Tensor) -> Masks | None:
        """Made once for each length: they do not depend on the tokens."""
        key = labels.shape[1], labels.device
        window = window_within(settings, labels.shape[1])
        if window is not None and key not in self._windows:
            with torch.inference_mode(False):
                self._windows[key] = window_masks(settings, window, *key)
        return self._windows.get(key)

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
        self.float8 = False  # `train.fp8_head`

    def forward(
        self, hidden: Tensor, labels: Tensor, *, per_token: bool = False, loss_tokens: int | None = None
    ) -> Tensor:
        """The sum of the losses or, `per_token`, each of them, in the shape of `labels` and 0 where they are IGNORED.
        `loss_tokens`: at most this many are not. Most of the others are then skipped."""
        head = self.head
        hidden = hidden.to(head.weight.dtype)
        kept = kept_tokens(labels.flatten(), loss_tokens)
        if self.loss == "plain":
            return self._plain(hidden, labels, per_token, kept)
        measure, most, columns = self.chunks(head.weight)
        # Chunks are sized by the full vocabulary, so that ranks with uneven shards of it issue the same collectives.
        rows = even_chunk(labels.numel() if kept is None else len(kept), most // int(head.out_features))
        compute = chunked_token_losses if per_token else chunked_cross_entropy
        found = compute(
            hidden.flatten(0, 1),
            head.weight,
            labels.flatten(),
            measure=measure,
            rows=rows,
            columns=columns,
            kept=kept,
            float8=self.float8,
        )
        return found.view_as(labels) if per_token else found

    def _plain(self, hidden: Tensor, labels: Tensor, per_token: bool, kept: Tensor | None) -> Tensor:
        if kept is None:
            logits = self._logits(hidden)
            return self.losses_of_logits(logits, labels) if per_token else self.loss_of_logits(logits, labels)
        found = self._plain(
            hidden.flatten(0, 1).index_select(0, kept)[None], labels.flatten()[kept][None], per_token, None
        )
        if not per_token:
            return found
        return found.new_zeros(labels.numel()).index_copy(0, kept, found[0]).view_as(labels)

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.head.weight
        padding = self.chunks(weight).columns - weight.shape[0]
        if not padding or type(self.head) is not nn.Linear:  # a patched head may be more than its matrix
            found: Tensor = self.head(hidden)
            return found
        return F.linear(hidden, F.pad(weight, (0, 0, 0, padding)))[..., :-padding]

    def chunks(self, weight: Tensor) -> Chunks:
        """How logits are computed from the head's weight or, with tensor parallelism, this rank's shard of it."""
        return choose_chunks(weight, self.measure, float8=self.float8)

    def loss_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), labels.flatten(), self.measure)

    def losses_of_logits(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each token."""
        return token_losses(logits.flatten(0, 1), labels.flatten(), self.measure).view_as(labels)


def _over_tokens(loss: Tensor, labels: Tensor) -> LossSums:
    return LossSums(loss, (loss.detach(), (labels != IGNORED).sum()))


def _cast_output_to_fp32(module: nn.Module, given: Any, found: Tensor) -> Tensor:
    return found.float()


def _cast_inputs(dtype: torch.dtype, module: nn.Module, given: Any) -> Any:
    return tuple(one.to(dtype) if isinstance(one, Tensor) and one.is_floating_point() else one for one in given)
