"""A model spread over ranks, as the loop sees it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from shoal.data.loader import MicroBatch
from shoal.models.anatomy import Anatomy
from shoal.parallel.gradients import Gradients
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.placement import Placement
from shoal.parallel.precision import ComputeCopies, Precision


class Runner(Protocol):
    """Runs the passes of a step, or of an evaluation: `MicroBatchRunner` one by one, `Pipeline` through its stages."""

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor: ...

    def measure(self, batches: Sequence[MicroBatch]) -> Tensor: ...


@dataclass
class ParallelModel:
    """What `parallelize` makes of a model."""

    modules: list[nn.Module]  # what was wrapped: one, or the stages of a pipeline that are here
    runner: Runner
    parallel_dims: ParallelDims
    anatomy: Anatomy  # of the whole model
    precision: Precision
    placement: Placement
    parameters: dict[str, nn.Parameter]  # the weights that are here, by their Hugging Face names
    buffers: dict[str, Tensor]  # what is kept with them and not trained
    gradients: Gradients
    copies: list[ComputeCopies]
    sequence_length: int | None  # all rows are padded to this; None: to the longest of a pass
    sequence_multiple: int  # … rounded up to a multiple of this
    notes: list[str]  # for the user: what is not done as was asked for

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """Gradients of `factor` times the mean over ranks of the summed loss. Returns this rank's sum, in fp64: ranks
        that have what another reports return zero, so that the sum over all ranks counts every target once."""
        total = self.runner.backward(batches, factor)
        self.gradients.finish()
        return total if self.parallel_dims.reports_loss else torch.zeros_like(total)

    @torch.no_grad()
    def measure(self, batches: Sequence[MicroBatch]) -> Tensor:
        """(summed loss, targets) of batches, without training on them; the sum over all ranks counts each once."""
        for module in self.modules:
            module.eval()
        sums = self.runner.measure(batches)
        for module in self.modules:
            module.train()
        return sums if self.parallel_dims.reports_loss else torch.zeros_like(sums)

    @property
    def saved(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model."""
        return {**self.parameters, **self.buffers}

    @property
    def low_precision(self) -> dict[Tensor, Tensor]:
        """The copies that are computed with, by the weights that they are copies of."""
        return {
            weight: copy for copies in self.copies for weight, copy in zip(copies.weights, copies.copies, strict=True)
        }

    def forget_gathered(self) -> None:
        """Before weights are loaded: what FSDP has gathered for the next forward pass are the old ones."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def weights_changed(self) -> None:
        """After an optimizer step, or after weights were loaded."""
        for copies in self.copies:
            copies.refresh()
