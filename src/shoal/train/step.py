"""One optimizer step: forward and backward of all micro-batches, gradient clipping, update.

The host does not wait for the device, except for Muon, whose kernels cannot skip a bad step, and for offloaded
optimizer state.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from shoal.data.loader import StepBatch
from shoal.observe.profile.ranges import OPTIMIZER, annotated
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.gradients import clip_factor
from shoal.parallel.model import ParallelModel, TrainedModel
from shoal.resilience.health import SpikeGuard


@dataclass(frozen=True)
class StepResult:
    """Device tensors. Reading them waits for the device."""

    sums: Tensor  # of the objective, of this rank, in fp64; the step's loss is the first, summed over ranks, / `weight`
    weight: int | None  # of all ranks: loss tokens, or examples; None: it is the second of the sums
    norm: Tensor
    usable: Tensor  # False: a non-finite gradient or a loss spike, and the step was skipped


class TrainStep:
    """Updates the weights from the micro-batches of one step."""

    def __init__(
        self,
        model: TrainedModel,
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
        # Data-parallel strategies average gradients over ranks where a sum is needed, hence the factor `ranks`: applied
        # to the loss, or after the backward pass with fp16, which would overflow sooner.
        ranks = model.parallel_dims.gradient_ranks
        self._before, self._after = (1, ranks) if scaler.enabled else (ranks, 1)

    def __call__(self, batch: StepBatch, lr: float) -> StepResult:
        assert isinstance(self.model, ParallelModel)
        sums = self.model.backward(batch.micro_batches, self.loss_factor(batch.weight))
        with annotated(OPTIMIZER):
            return self.update(sums, batch.weight, lr)

    def loss_factor(self, weight: float) -> Tensor | float:
        """What the summed loss of each micro-batch is multiplied with before its backward pass, so that the step's loss
        is the mean over `weight`, which is that of all ranks and micro-batches."""
        factor = self._before / weight
        return self.scaler.scale * factor if self.scaler.enabled else factor

    def update(
        self, sums: Tensor, weight: int | None, lr: float | None, correction: Tensor | None = None
    ) -> StepResult:
        """Clip the gradients that the backward passes have left, and update the weights. `correction`: a factor of the
        gradients that was not known before the backward passes."""
        gradients = self.model.gradients
        after: Tensor | None = None  # what gradients are still to be multiplied with
        if self.scaler.enabled:
            after = self._after / self.scaler.scale
        if correction is not None:
            after = correction if after is None else correction * after
        norm = gradients.norm() if after is None else gradients.norm() * after
        finite = usable = norm.isfinite()
        if self.guard is not None:
            total = self.total(sums.clone())
            mean = total[0] / (total[1] if weight is None else weight)
            usable = usable & self.guard.accepts(mean).to(usable.device)
        factor = None
        if self.clip is not None or after is not None:
            factor = clip_factor(norm, self.clip)
            factor = factor if after is None else factor * after
        if factor is not None and not self.optimizer.takes_factor:
            gradients.multiply(factor)
            factor = None
        self.optimizer.step(lr, usable, factor)
        gradients.clear()
        self.scaler.update(finite)  # a spike does not concern the loss scale
        if not self.optimizer.writes_copies:
            self.model.weights_changed()
        return StepResult(sums, weight, norm, usable)
