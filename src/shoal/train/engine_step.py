"""One optimizer step in DeepSpeed's engine with ZeRO 1 to 3, which measures, clips and updates in one call."""

import torch

from shoal.data.loader import StepBatch
from shoal.observe.profile.ranges import OPTIMIZER, annotated
from shoal.parallel.deepspeed import EngineModel
from shoal.train.step import StepResult, TrainStep


class EngineStep(TrainStep):
    """As `TrainStep`, of which it uses the loss scaler only. The host waits for the device, as DeepSpeed does."""

    def __call__(self, batch: StepBatch, lr: float) -> StepResult:
        model = self.model
        assert isinstance(model, EngineModel)
        if model.zero.state_waits:
            self._make_place_for_state(batch)
            model.zero.put_state()
        ranks = model.parallel_dims.gradient_ranks
        if self.scaler.enabled:
            # As without DeepSpeed: gradients are averaged over ranks before they are multiplied by their number.
            model.zero.scale_loss(float(self.scaler.scale) / ranks)
        sums = model.backward(batch.micro_batches, ranks / batch.weight)
        with annotated(OPTIMIZER):
            norm, applied = model.zero.step(lr)
        self.scaler.update(applied)
        return StepResult(sums, batch.weight, norm, applied)

    def _make_place_for_state(self, batch: StepBatch) -> None:
        """DeepSpeed makes optimizer state in the first step: one with no gradients and a learning rate of zero, which
        changes nothing."""
        model = self.model
        assert isinstance(model, EngineModel)
        if model.zero.has_state:
            return
        waiting = model.zero.state
        device = model.parallel_dims.device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            model.backward(batch.micro_batches[:1], 0.0)
            model.zero.step(0.0)
        model.zero.state = waiting
