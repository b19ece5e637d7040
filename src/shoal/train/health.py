"""What can go wrong while training, noticed early: requests to stop, losses that are not numbers, spikes."""

import math
import signal
from types import FrameType

import torch
import torch.distributed as dist

from shoal.config.schema_train import SpikeConfig
from shoal.parallel.ranks import Ranks


class Diverged(Exception):
    """The run failed: a loss or a gradient is not a number, and `train.on_nan` says to stop."""


STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """A signal means: finish the step, save, stop. A second one means: now.

    Ranks must agree on the step after which they stop, or one would wait for the others for ever. The flags are
    summed on the host while the next step runs, so that asking costs nothing.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.signal: int | None = None
        self._asked: tuple[dist.Work, torch.Tensor] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in STOP_SIGNALS:
            self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def agreed(self) -> bool:
        """Whether any rank had been asked to stop by the time of the previous call (alone: by now)."""
        if self.ranks.world_size == 1:
            return self.signal is not None
        stop = False
        if self._asked is not None:
            work, flag = self._asked
            work.wait()
            stop = bool(flag)
        flag = torch.tensor([1.0 if self.signal is not None else 0.0])
        work = dist.all_reduce(flag, async_op=True)
        assert work is not None
        self._asked = (work, flag)
        return stop

    def settle(self) -> None:
        """Wait for the last question, so that no collective is left open at the end."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None


def spike_sigma(setting: str | SpikeConfig) -> float:
    """How far above the recent mean a loss must be to count as a spike."""
    return setting.sigma if isinstance(setting, SpikeConfig) else SpikeConfig().sigma


class SpikeWatch:
    """Remembers recent losses and says when one stands far above them."""

    def __init__(self, sigma: float, memory: float = 0.98, settled_after: int = 20) -> None:
        self.sigma = sigma
        self.memory = memory
        self.settled_after = settled_after
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
