"""Running the passes of a step on a model that is whole on this rank, or sharded: forward and backward, one by one."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shoal.data.loader import MicroBatch

Prepare = Callable[[MicroBatch], MicroBatch]


class MicroBatchRunner:
    """One way to run passes; `parallel.pipeline.Pipeline` is the other."""

    def __init__(self, module: nn.Module, prepare: Prepare, *, keeps_weights: bool) -> None:
        self.module = module
        self.prepare = prepare
        self.keeps_weights = keeps_weights  # FSDP that gathers once a step and not once a pass

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """Add the gradients of `factor` times the summed loss; returns that sum, without the factor, in fp64."""
        total: Tensor | None = None
        for index, batch in enumerate(batches):
            with self._accumulating(last=index == len(batches) - 1):
                loss, _ = self.module(self.prepare(batch))
                torch.autograd.backward(loss * factor)
            loss = loss.detach().double()
            total = loss if total is None else total + loss
        assert total is not None, "a step has a pass"
        return total

    def measure(self, batches: Sequence[MicroBatch]) -> Tensor:
        """(summed loss, targets) without gradients, in fp64."""
        sums = [torch.stack([one.double() for one in self.module(self.prepare(batch))]) for batch in batches]
        return torch.stack(sums).sum(0)

    def _accumulating(self, last: bool) -> AbstractContextManager[None]:
        """Around one pass. DDP averages gradients in the last only, and so do replicas of a sharded model.

        Shards are reduced in every pass: no whole gradient is ever held, which is what FSDP was chosen for.
        """
        if isinstance(self.module, DistributedDataParallel) and not last:
            return self.module.no_sync()
        if isinstance(self.module, FSDPModule):
            self.module.set_requires_all_reduce(last)
            if self.keeps_weights:
                # Freed at the end of the step at the latest: else the next would compute with weights of the last.
                self.module.set_reshard_after_backward(last)
        return nullcontext()
