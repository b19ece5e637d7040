"""One optimizer step: passes, one clip, one update.

The host does not wait for the device here, but for Lion and Muon, which have no kernel that could skip a bad step, and
where the optimizer's state is brought from the host.
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
    """Device tensors, to be read when the numbers are needed and not before."""

    loss_sum: Tensor  # over this rank's target tokens, in fp64: the step's loss is the sum over ranks by `loss_tokens`
    loss_tokens: int  # of all ranks
    norm: Tensor
    usable: Tensor  # false: a number was not finite, or the loss a spike, and the step changed nothing


class TrainStep:
    """Turns a batch into an update of the weights."""

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
        self.guard = guard  # leaves out steps whose loss is a spike
        self.total = total  # the sum over all ranks, in place

    def __call__(self, batch: StepBatch, lr: float) -> StepResult:
        # The loss is the sum over all target tokens of the step, on all ranks, divided by their number. Data-parallel
        # strategies average gradients over ranks where a sum is wanted, hence `ranks`: in the loss, or afterwards where
        # fp16 would overflow that much sooner than in one process.
        ranks = self.model.parallel_dims.gradient_ranks
        before, after = (1, ranks) if self.scaler.enabled else (ranks, 1)
        gradients, scale = self.model.gradients, self.scaler.scale
        total = self.model.backward(batch.micro_batches, scale * (before / batch.loss_tokens))
        norm = gradients.norm() * after / scale
        finite = usable = norm.isfinite()
        if self.guard is not None:
            usable = usable & self.guard.fine(self.total(total.clone()) / batch.loss_tokens).to(usable.device)
        factor = None
        if self.clip is not None or self.scaler.enabled:
            factor = clip_factor(norm, self.clip) * after / scale
        if factor is not None and not self.optimizer.takes_factor:
            gradients.multiply(factor)
            factor = None
        self.optimizer.step(lr, usable, factor)
        gradients.clear()
        self.scaler.update(finite)  # a spike says nothing about the scale
        if not self.optimizer.writes_copies:
            self.model.weights_changed()
        return StepResult(total, batch.loss_tokens, norm, usable)
