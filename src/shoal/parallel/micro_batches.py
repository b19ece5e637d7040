"""Run the micro-batches of a step one by one, on a model without pipeline stages."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shoal.data.loader import MicroBatch
from shoal.models.loss import LossSums

Prepare = Callable[[MicroBatch], MicroBatch]


class MicroBatchRunner:
    """The runner without pipeline stages; `parallel.pipeline.Pipeline` is the other."""

    def __init__(self, module: nn.Module, prepare: Prepare, *, keeps_weights: bool) -> None:
        self.module = module
        self.prepare = prepare
        self.keeps_weights = keeps_weights  # FSDP all-gathers once per step, not per micro-batch

    def backward(self, batches: Sequence[MicroBatch], factor: Tensor | float) -> Tensor:
        """Accumulate the gradients of `factor` times the summed loss; returns the sums of the objective, the unscaled
        loss first, in fp64."""
        total: Tensor | None = None
        for index, batch in enumerate(batches):
            sums = self.run(batch, factor, last=index == len(batches) - 1)
            total = sums if total is None else total + sums
        assert total is not None, "a step has at least one micro-batch"
        return total

    def run(self, batch: MicroBatch, factor: Tensor | float, *, last: bool) -> Tensor:
        """One micro-batch of `backward`. `last`: of the step."""
        with accumulating(self.module, last=last, keeps_weights=self.keeps_weights):
            return self.forward_backward(self.prepare(batch), factor)

    def forward_backward(self, batch: MicroBatch, factor: Tensor | float) -> Tensor:
        found: LossSums = self.module(batch)
        torch.autograd.backward(found.trained * factor)
        return joined(found.sums)

    def measure(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The sums of the objective, without gradients, in fp64."""
        found: list[LossSums] = [self.module(self.prepare(batch)) for batch in batches]
        return torch.stack([joined(each.sums) for each in found]).sum(0)


def joined(sums: Sequence[Tensor]) -> Tensor:
    """The scalars and vectors of an objective in one vector, in fp64."""
    return torch.cat([one.double().reshape(-1) for one in sums])


def accumulating(module: nn.Module, *, last: bool, keeps_weights: bool) -> AbstractContextManager[None]:
    """Context of one micro-batch. DDP, and the replicas of a sharded model, all-reduce only in the last one.

    FSDP reduce-scatters in every micro-batch: holding unsharded gradients would give up the memory it saves. With
    `keeps_weights` it all-gathers once per step.
    """
    if isinstance(module, DistributedDataParallel) and not last:
        return module.no_sync()
    if isinstance(module, FSDPModule):
        module.set_requires_all_reduce(last)
        if keeps_weights:
            # Must be freed at the end of the step: the next step would otherwise use stale weights.
            module.set_reshard_after_backward(last)
    return nullcontext()
