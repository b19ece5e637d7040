"""What can go wrong while training, noticed early: requests to stop, losses that are not numbers, spikes."""

import math
import signal
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from types import FrameType

import torch
from torch import Tensor

from shoal.config.schema_train import SpikeConfig
from shoal.mistakes import RunFailed
from shoal.resilience.signals import SAME_REQUEST, STOP_SIGNALS, second_signal_ends


class Diverged(RunFailed):
    """The run failed: losses or gradients are not numbers, and `train.on_nan` says to stop, or nothing else helps."""


class Rollback(Exception):
    """These steps, one after the other, came to nothing: go on from before them, without their rows."""

    def __init__(self, steps: Sequence[int]) -> None:
        super().__init__(f"steps {steps[0]} to {steps[-1]}")
        self.steps = steps


class StopRequest:
    """A signal means: finish the step, save, stop. A second one means: now.

    Ranks must agree on the step after which they stop, or one would wait for the others for ever: `wanted` is what
    this one would tell them.
    """

    def __init__(self, same_request: float = SAME_REQUEST) -> None:
        self.signal: int | None = None
        self.same_request = same_request
        self._leave = ExitStack()

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # signals are no other's business
            for number in STOP_SIGNALS:
                self._leave.callback(signal.signal, number, signal.signal(number, self._receive))
            self._leave.enter_context(second_signal_ends(self.same_request))
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.close()

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number


def spike_settings(setting: str | SpikeConfig) -> SpikeConfig:
    """`train.on_spike` as a block."""
    return setting if isinstance(setting, SpikeConfig) else SpikeConfig.model_validate({"action": setting})


class SpikeWatch:
    """Remembers recent losses and says when one stands far above them."""

    memory, settled_after = 0.98, 20

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.seen = 0
        self.mean = 0.0
        self.variance = 0.0

    def look(self, loss: float) -> float | None:
        """How many standard deviations `loss` is above the recent mean, if that is a spike."""
        if not math.isfinite(loss):
            return None
        spread = math.sqrt(self.variance)
        height = (loss - self.mean) / spread if spread > 0 else 0.0
        if self.seen >= self.settled_after and height > self.sigma:
            return height  # not remembered: a spike must not raise the bar for the next
        self.seen += 1
        weight = max(1 - self.memory, 1 / self.seen)
        change = loss - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change * change)
        return None


class SpikeGuard:
    """The same on the device, where a step can be left out before it is made and without asking the host."""

    def __init__(self, sigma: float, device: torch.device) -> None:
        self.sigma = sigma
        self.numbers = torch.zeros(3, dtype=torch.float64, device=device)  # seen, mean, variance

    def fine(self, loss: Tensor) -> Tensor:
        """Whether `loss` is no spike."""
        seen, mean, variance = self.numbers
        spike = (seen >= SpikeWatch.settled_after) & (variance > 0) & (loss - mean > self.sigma * variance.sqrt())
        counted = seen + 1
        weight = (1 / counted).clamp(min=1 - SpikeWatch.memory)
        change = loss - mean
        after = torch.stack([counted, mean + weight * change, (1 - weight) * (variance + weight * change * change)])
        self.numbers = torch.where(spike | ~loss.isfinite(), self.numbers, after)
        fine: Tensor = ~spike
        return fine

    def state(self) -> dict[str, Tensor]:
        return {"numbers": self.numbers}

    def load(self, state: dict[str, Tensor]) -> None:
        if state:
            self.numbers.copy_(state["numbers"])
