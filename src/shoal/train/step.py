"""One optimizer step: forward and backward of all micro-batches, gradient clipping, update.

The host does not wait for the device, except for Muon, whose kernels cannot skip a bad step, and for offloaded
optimizer state.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.data.loader import StepBatch
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.gradients import clip_factor
from shoal.parallel.model import ParallelModel
from shoal.resilience.health import SpikeGuard


@dataclass(frozen=True)
class StepResult:
    """Device tensors. Reading them waits for the device."""

    sums: Tensor  # of the objective, of this rank, in fp64; the step's loss is the first, summed over ranks, / `weight`
    weight: int  # of all ranks: loss tokens, or examples
    norm: Tensor
    usable: Tensor  # False: a non-finite gradient or a loss spike, and the step was skipped


class TrainStep:
    """Updates the weights from the micro-batches of one step."""

    def __init__(
        self,
        model: ParallelModel,
        optimizer: NamedOptimizer,
        scaler: LossScaler,
        *,
        clip: float | None,
        guard: SpikeGuard | None = None,
        total: Callable[[Tensor], Tensor] = lambda tensor: tensor,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.scaler = scaler
        self.clip = clip
        self.guard = guard  # skips steps whose loss is a spike
        self.total = total  # the sum over all ranks, in place

    def __call__(self, batch: StepBatch, lr: float) -> StepResult:
        # The loss is the mean over all ranks' loss tokens. Data-parallel strategies average gradients over ranks
        # where a sum is needed, hence the factor `ranks`: applied to the loss, or after the backward pass with fp16,
        # which would overflow sooner.
        ranks = self.model.parallel_dims.gradient_ranks
        before, after = (1, ranks) if self.scaler.enabled else (ranks, 1)
        gradients, scale = self.model.gradients, self.scaler.scale
        sums = self.model.backward(batch.micro_batches, scale * (before / batch.weight))
        norm = gradients.norm() * after / scale
        finite = usable = norm.isfinite()
        if self.guard is not None:
            usable = usable & self.guard.accepts(self.total(sums[0].clone()) / batch.weight).to(usable.device)
        factor = None
        if self.clip is not None or self.scaler.enabled:
            factor = clip_factor(norm, self.clip) * after / scale
        if factor is not None and not self.optimizer.takes_factor:
            gradients.multiply(factor)
            factor = None
        self.optimizer.step(lr, usable, factor)
        gradients.clear()
        self.scaler.update(finite)  # a spike does not concern the loss scale
        if not self.optimizer.writes_copies:
            self.model.weights_changed()
        return StepResult(sums, batch.weight, norm, usable)
