"""What can go wrong while training, noticed early: requests to stop, losses that are not numbers, spikes."""

import math
import signal
from collections.abc import Sequence
from types import FrameType

import torch
from torch import Tensor

from shoal.config.schema_train import SpikeConfig
from shoal.mistakes import RunFailed
from shoal.signals import STOP_SIGNALS, second_signal_ends


class Diverged(RunFailed):
    """The run failed: losses or gradients are not numbers, and `train.on_nan` says to stop, or nothing else helps."""


class GoBack(Exception):
    """These steps, one after the other, came to nothing: go on from before them, without their rows."""

    def __init__(self, steps: Sequence[int]) -> None:
        super().__init__(f"steps {steps[0]} to {steps[-1]}")
        self.steps = steps


class StopRequest:
    """A signal means: finish the step, save, stop. A second one means: now.

    Ranks must agree on the step after which they stop, or one would wait for the others for ever: `wanted` is what
    this one would tell them.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        self._second = second_signal_ends()
        self._second.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._second.__exit__(None, None, None)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

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
