"""Run the micro-batches of a step through a pipeline schedule."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.config.schema import Config
from shoal.data.loader import IGNORED, MicroBatch
from shoal.models.loss import LanguageModel
from shoal.parallel.micro_batches import Prepare
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.stages import stages_per_rank

# Names in torch.distributed.pipelining.schedules.
SCHEDULES = {
    "1f1b": "Schedule1F1B",
    "interleaved": "ScheduleInterleaved1F1B",
    "zero-bubble": "ScheduleInterleavedZeroBubble",
}


class Stage(nn.Module):
    """From token ids, or the previous stage's hidden states, to hidden states, or the loss."""

    def __init__(self, inner: LanguageModel, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.inner = inner
        self.is_first = is_first
        self.is_last = is_last
        # The loss tokens of each micro-batch, in the order in which they arrive. Not an argument: arguments are tensors
        # on the device, which the host cannot read without waiting.
        self.loss_tokens: Iterator[int | None] = repeat(None)

    def forward(
        self,
        given: Tensor,
        *,
        labels: Tensor,
        positions: Tensor,
        documents: Tensor | None = None,
        mask: Tensor | None = None,
        reference: Tensor | None = None,
    ) -> Tensor:
        loss_tokens = next(self.loss_tokens) if self.is_last else None
        batch = MicroBatch(given, labels, positions, documents, mask, reference, loss_tokens)
        name = "input_ids" if self.is_first else "inputs_embeds"
        hidden = self.inner.hidden({name: given, **self.inner.model_kwargs(batch)})
        # The output of a stage must own its memory: zero-bubble schedules detach it in place.
        if self.is_last:
            found = self.inner.losses(hidden, batch)
            return torch.stack([found.trained, *(one.to(found.trained.dtype) for one in found.sums)])
        if hidden._is_view():
            # GPT-2 reshapes its output by the shape of its input, which with sequence parallelism is a shard.
            hidden = hidden.reshape(given.shape[0], -1, hidden.shape[-1]).clone()
        return hidden


class Pipeline:
    """The runner for pipeline stages; `parallel.micro_batches.MicroBatchRunner` is the one without."""

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
        sums: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`stages`: (index, module) of this rank's stages. `tokens`, `hidden`: shapes of a micro-batch's tensors.
        `sums`: how many the objective has."""
        # Not at the top: they import the compiler, which takes a second, for every start without a pipeline too.
        from torch.distributed.pipelining import PipelineStage, schedules

        self.prepare = prepare
        self.grad_accum_steps = grad_accum_steps
        self.last = [part for _, one in stages for part in one.modules() if isinstance(part, Stage) and part.is_last]
        self.device = device
        self._factor: Tensor | float = 1.0
        self._sums = torch.zeros(sums, dtype=torch.float64, device=device)
        # Example tensors, so that stages need no first forward pass to infer what they send and receive.
        between = torch.empty(hidden, dtype=dtype, device="meta", requires_grad=True)
        made = [
            PipelineStage(
                module,
                index,
                count,
                device,
                input_args=torch.empty(tokens, dtype=torch.int64, device="meta") if index == 0 else between,
                output_args=torch.empty(1 + sums, device="meta", requires_grad=True) if index == count - 1 else between,
                group=group,
            )
            for index, module in stages
        ]
        self.first = any(index == 0 for index, _ in stages)
        kind: Any = getattr(schedules, SCHEDULES[schedule])
        if schedule == "1f1b" and grad_accum_steps < count:
            kind = schedules.ScheduleGPipe  # equivalent with so few micro-batches, which Schedule1F1B rejects
        self._schedule = kind(
            made[0] if schedule == "1f1b" else made,
            grad_accum_steps,
            loss_fn=self._take_loss,
            scale_grads=False,  # `factor` already divides by the loss tokens of the step
        )

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """As `MicroBatchRunner.backward`; ranks that do not have the last stage return zero."""
        self._factor = factor
        return self._run(self._schedule.step, [self.prepare(batch) for batch in batches])

    def measure(self, batches: Sequence[MicroBatch]) -> Tensor:
        """As `MicroBatchRunner.measure`, for any number of batches: the last run of the schedule is padded with batches
        without labels."""
        sums = torch.zeros_like(self._sums)
        for start in range(0, len(batches), self.grad_accum_steps):
            part = [self.prepare(batch) for batch in batches[start : start + self.grad_accum_steps]]
            padding = [_without_labels(part[0])] * (self.grad_accum_steps - len(part))
            sums += self._run(self._schedule.eval, part + padding)
        return sums

    def _run(self, run: Any, prepared: Sequence[MicroBatch]) -> Tensor:
        self._sums = torch.zeros_like(self._sums)
        for stage in self.last:
            stage.loss_tokens = iter([one.loss_tokens for one in prepared])
        # The schedule splits them again along the batch dimension.
        inputs, labels = (torch.cat([getattr(one, name) for one in prepared]) for name in ("inputs", "labels"))
        kwargs = {
            name: torch.cat([getattr(one, name) for one in prepared])
            for name in ("labels", "positions", "documents", "mask")
            if getattr(prepared[0], name) is not None
        }
        references = [one.reference for one in prepared if one.reference is not None]
        if references:
            most = max(one.shape[1] for one in references)  # pairs of a sequence
            kwargs["reference"] = torch.cat([F.pad(one, (0, 0, 0, most - one.shape[1])) for one in references])
        run(*([inputs] if self.first else []), target=labels if self.last else None, losses=[], **kwargs)
        return self._sums

    def _take_loss(self, found: Tensor, _: Tensor) -> Tensor:
        self._sums = self._sums + found.detach()[1:].double()
        return found[0] * self._factor


def make_pipeline(
    stages: Sequence[tuple[int, nn.Module]],
    config: Config,
    parallel_dims: ParallelDims,
    *,
    prepare: Prepare,
    micro_batch: int,
    grad_accum_steps: int,
    hidden_size: int,
    sums: int,
    dtype: torch.dtype,
) -> Pipeline:
    """The runner of this rank's `stages`; `dtype` is that of the hidden states between them."""
    assert parallel_dims.pp is not None
    length = config.data.max_length // parallel_dims.mesh.cp
    return Pipeline(
        stages,
        count=parallel_dims.mesh.pp * stages_per_rank(config.parallel.pp_schedule),
        group=parallel_dims.pp,
        schedule=config.parallel.pp_schedule,
        grad_accum_steps=grad_accum_steps,
        prepare=prepare,
        tokens=(micro_batch, length),
        hidden=(micro_batch, length // parallel_dims.mesh.tp, hidden_size),
        sums=sums,
        dtype=dtype,
        device=parallel_dims.device,
    )


def _without_labels(batch: MicroBatch) -> MicroBatch:
    return replace(batch, labels=torch.full_like(batch.labels, IGNORED), loss_tokens=0)
