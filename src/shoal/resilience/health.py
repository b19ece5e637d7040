"""Stop requests by signal, non-finite losses and loss spikes."""

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
    """The run failed: losses or gradients are non-finite, and `train.on_nan` says to stop or rollbacks do not help."""


class Rollback(Exception):
    """Consecutive steps were non-finite: resume from a checkpoint before them and skip their sequences."""

    def __init__(self, steps: Sequence[int]) -> None:
        super().__init__(f"steps {steps[0]} to {steps[-1]}")
        self.steps = steps


class StopRequest:
    """The first signal asks to finish the step, save and stop. A second one ends the process at once.

    Ranks must stop after the same step, or one would wait for the others forever: `wanted` is this rank's vote.
    """

    def __init__(self, same_request: float = SAME_REQUEST) -> None:
        self.signal: int | None = None
        self.same_request = same_request
        self._cleanup = ExitStack()

    @property
    def wanted(self) -> bool:
        return self.signal is not None

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():  # only the main thread can install handlers
            for number in STOP_SIGNALS:
                self._cleanup.callback(signal.signal, number, signal.signal(number, self._receive))
            self._cleanup.enter_context(second_signal_ends(self.same_request))
        return self

    def __exit__(self, *_: object) -> None:
        self._cleanup.close()

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is None:
            self.signal = number


def spike_settings(setting: str | SpikeConfig) -> SpikeConfig:
    """`train.on_spike` as a config block."""
    return setting if isinstance(setting, SpikeConfig) else SpikeConfig.model_validate({"action": setting})


class SpikeDetector:
    """Keeps a moving mean and variance of the loss, and reports losses far above the mean."""

    decay, warmup = 0.98, 20

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma
        self.seen = 0
        self.mean = 0.0
        self.variance = 0.0

    def update(self, loss: float) -> float | None:
        """How many standard deviations `loss` is above the recent mean, if that is a spike."""
        if not math.isfinite(loss):
            return None
        deviation = math.sqrt(self.variance)
        height = (loss - self.mean) / deviation if deviation > 0 else 0.0
        if self.seen >= self.warmup and height > self.sigma:
            return height  # not included: a spike must not raise the threshold
        self.seen += 1
        weight = max(1 - self.decay, 1 / self.seen)
        change = loss - self.mean
        self.mean += weight * change
        self.variance = (1 - weight) * (self.variance + weight * change * change)
        return None


class SpikeGuard:
    """The same on the device, where a step can be skipped without waiting for the host."""

    def __init__(self, sigma: float, device: torch.device) -> None:
        self.sigma = sigma
        self.statistics = torch.zeros(3, dtype=torch.float64, device=device)  # seen, mean, variance

    def accepts(self, loss: Tensor) -> Tensor:
        """Whether `loss` is not a spike."""
        seen, mean, variance = self.statistics
        spike = (seen >= SpikeDetector.warmup) & (variance > 0) & (loss - mean > self.sigma * variance.sqrt())
        counted = seen + 1
        weight = (1 / counted).clamp(min=1 - SpikeDetector.decay)
        change = loss - mean
        after = torch.stack([counted, mean + weight * change, (1 - weight) * (variance + weight * change * change)])
        self.statistics = torch.where(spike | ~loss.isfinite(), self.statistics, after)
        accepted: Tensor = ~spike
        return accepted

    def state(self) -> dict[str, Tensor]:
        return {"numbers": self.statistics}

    def load(self, state: dict[str, Tensor]) -> None:
        if state:
            self.statistics.copy_(state["numbers"])
