"""Running the passes of a step through a pipeline: the passes are its micro-batches."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

from shoal.data.loader import IGNORED, MicroBatch
from shoal.models.loss import LanguageModel
from shoal.parallel.micro_batches import Prepare

SCHEDULES: dict[str, Any] = {
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
}


class Stage(nn.Module):
    """Tokens, or what the stage before made of them → hidden states, or the loss."""

    def __init__(self, inner: LanguageModel, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.inner = inner
        self.is_first = is_first
        self.is_last = is_last

    def forward(
        self,
        given: Tensor,
        *,
        labels: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        batch = MicroBatch(given, labels, positions, documents, mask)
        name = "input_ids" if self.is_first else "inputs_embeds"
        hidden = self.inner.hidden({name: given, **self.inner.surroundings(batch)})
        # What leaves a stage must own its memory: zero-bubble schedules detach it in place.
        if self.is_last:
            return torch.stack([self.inner.end(hidden, labels)])
        if hidden._is_view():
            # GPT-2 folds what it returns to the shape of its tokens, of which a tensor-parallel rank has a part.
            hidden = hidden.reshape(given.shape[0], -1, hidden.shape[-1]).clone()
        return hidden


class Pipeline:
    """The other way to run passes: `parallel.micro_batches.MicroBatchRunner` is the one without stages."""

    def __init__(
        self,
        stages: Sequence[tuple[int, nn.Module]],
        *,
        count: int,
        group: dist.ProcessGroup,
        schedule: str,
        grad_accum_steps: int,
        prepare: Prepare,
        tokens: tuple[int, int],
        hidden: tuple[int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`stages` are (number, module) of those on this rank; `tokens` and `hidden` the shapes of a pass's tensors."""
        self.prepare = prepare
        self.grad_accum_steps = grad_accum_steps
        self.has_last = any(number == count - 1 for number, _ in stages)
        self.device = device
        self._factor: Tensor | float = 1.0
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        # Given as examples, so that stages need not find out by a first pass what they exchange: this and its gradient.
        between = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        made = [
            PipelineStage(
                module,
                number,
                count,
                device,
                input_args=torch.empty(tokens, dtype=torch.int64, device="meta") if number == 0 else between,
                output_args=torch.empty(1, device="meta", requires_grad=True) if number == count - 1 else between,
                group=group,
            )
            for number, module in stages
        ]
        self.first = any(number == 0 for number, _ in stages)
        kind = SCHEDULES[schedule]
        if schedule == "1f1b" and grad_accum_steps < count:
            kind = ScheduleGPipe  # with so few passes they are the same, but Schedule1F1B refuses them
        self._schedule = kind(
            made[0] if schedule == "1f1b" else made,
            grad_accum_steps,
            loss_fn=self._take_loss,
            scale_grads=False,  # ours is a sum, already divided by the number of targets of the whole step
        )

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """As `MicroBatchRunner.backward`; ranks that do not have the last stage return zero."""
        self._factor = factor
        return self._run(self._schedule.step, [self.prepare(batch) for batch in batches])

    def measure(self, batches: Sequence[MicroBatch]) -> Tensor:
        """As `MicroBatchRunner.measure`, for any number of batches: the last round is filled up, and what fills it not counted."""
        loss = torch.zeros((), dtype=torch.float64, device=self.device)
        loss_tokens = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, len(batches), self.grad_accum_steps):
            part = [self.prepare(batch) for batch in batches[start : start + self.grad_accum_steps]]
            if self.has_last:
                loss_tokens += sum((batch.labels != IGNORED).sum() for batch in part)
            blank = [_without_loss_tokens(part[0])] * (self.grad_accum_steps - len(part))
            loss += self._run(self._schedule.eval, part + blank)
        return torch.stack([loss, loss_tokens])

    def _run(self, run: Any, prepared: Sequence[MicroBatch]) -> Tensor:
        self._total = torch.zeros_like(self._total)
        # The schedule cuts them apart again, along the rows.
        inputs, labels = (torch.cat([getattr(one, name) for one in prepared]) for name in ("inputs", "labels"))
        beside = {
            name: torch.cat([getattr(one, name) for one in prepared])
            for name in ("labels", "positions", "documents", "mask")
            if getattr(prepared[0], name) is not None
        }
        run(*([inputs] if self.first else []), target=labels if self.has_last else None, losses=[], **beside)
        return self._total

    def _take_loss(self, loss: Tensor, _: Tensor) -> Tensor:
        self._total = self._total + loss.detach().double().sum()
        return loss.sum() * self._factor


def _without_loss_tokens(batch: MicroBatch) -> MicroBatch:
    return MicroBatch(
        batch.inputs, torch.full_like(batch.labels, IGNORED), batch.positions, batch.documents, batch.mask
    )
