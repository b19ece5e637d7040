"""A parallelized model, as the training loop sees it."""

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
    """Runs the micro-batches of a step or an evaluation: `MicroBatchRunner` one by one, `Pipeline` on a schedule."""

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor: ...

    def measure(self, batches: Sequence[MicroBatch]) -> Tensor: ...


@dataclass(kw_only=True)
class TrainedModel:
    """Any model that is parallelized: what optimizer steps and checkpoints need of it."""

    modules: list[nn.Module]  # the wrapped module, or this rank's pipeline stages
    parallel_dims: ParallelDims
    precision: Precision
    placement: Placement
    parameters: dict[str, nn.Parameter]  # this rank's weights, by name: of a transformers model, Hugging Face's
    buffers: dict[str, Tensor]  # persistent buffers
    gradients: Gradients
    copies: list[ComputeCopies]
    notes: list[str]  # for the user: options that have no effect or only a partial one

    @property
    def saved(self) -> dict[str, Tensor]:
        """The tensors of the model that a checkpoint contains: with an adapter, the trained ones."""
        return {name: one for name, one in {**self.parameters, **self.buffers}.items() if name in self.placement.shapes}

    @property
    def low_precision(self) -> dict[Tensor, Tensor]:
        """The low-precision compute copies, by their master weights."""
        return {
            weight: copy for copies in self.copies for weight, copy in zip(copies.weights, copies.copies, strict=True)
        }

    def before_save(self) -> None:
        """Before the state is collected for a checkpoint, on every rank."""
        return

    def reshard(self) -> None:
        """Before weights are loaded: free the old ones that FSDP may have gathered for the next forward pass."""
        for module in self.modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()

    def weights_changed(self) -> None:
        """Refresh the compute copies, after an optimizer step or after weights were loaded."""
        for copies in self.copies:
            copies.refresh()


@dataclass(kw_only=True)
class ParallelModel(TrainedModel):
    """The result of `parallelize`: a language model with its loss."""

    runner: Runner
    anatomy: Anatomy  # of the complete model
    sequence_length: int | None  # sequences are padded to this; None: to the longest of a micro-batch
    sequence_multiple: int  # the padded length is a multiple of this

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """Gradients of `factor` times the mean over ranks of the summed loss. Returns this rank's sums of the objective
        in fp64, the loss first; ranks with a duplicate of another rank's return zeros, so that the sum over ranks
        counts every loss token once."""
        total = self.runner.backward(batches, factor)
        self.gradients.finish()
        return total if self.parallel_dims.reports_loss else torch.zeros_like(total)

    @torch.no_grad()
    def measure(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The sums of the objective, without gradients; the sum over all ranks counts each sequence once."""
        for module in self.modules:
            module.eval()
        sums = self.runner.measure(batches)
        for module in self.modules:
            module.train()
        return sums if self.parallel_dims.reports_loss else torch.zeros_like(sums)
