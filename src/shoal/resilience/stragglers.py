"""Which rank keeps the others waiting.

Ranks that train together take the same time for a step, however unequal they are: the fast ones wait in collectives.
So each times what it does alone: its wait for data, and a small fixed product, run now and then, that tells how fast
its chip is just now.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from shoal.config.schema_train import SlowRankConfig
from shoal.observe.device_clock import Mark, mark, seconds_between
from shoal.parallel.ranks import Ranks

SHARE = 0.01  # of the time, at most, goes into timing
MEMORY = 0.7  # how much of the past is left in a rank's numbers at each new one


class Pace:
    """This rank's own times, to be told to the others."""

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.device
        on_device = ranks.device.type == "cuda"
        size, dtype = (2048, torch.bfloat16) if on_device else (384, torch.float32)
        self._matrix = torch.ones(size, size, dtype=dtype, device=ranks.device) if ranks.world_size > 1 else None
        self._probe: tuple[Mark, Mark] | None = None
        self._next = 0.0
        self.product = 0.0  # seconds; zero: not measured yet
        self.data = 0.0

    def after_step(self, data_seconds: float) -> tuple[float, float]:
        """Seconds for the product and for data, as they were lately."""
        self.data = MEMORY * self.data + (1 - MEMORY) * data_seconds
        if self._matrix is not None and time.perf_counter() >= self._next:
            self._measure(self._matrix)
        return self.product, self.data

    def _measure(self, matrix: torch.Tensor) -> None:
        """Read the product that was given to the device last time; give it the next."""
        if self._probe is not None:
            if not self._probe[1].reached():
                return
            seconds = seconds_between(*self._probe)
            self.product = MEMORY * self.product + (1 - MEMORY) * seconds if self.product else seconds
            self._next = time.perf_counter() + seconds / SHARE
        began = mark(self.device)
        torch.mm(matrix, matrix)
        self._probe = (began, mark(self.device))


class StragglerDetector:
    """Names a rank once, when it has been behind the others for long enough."""

    def __init__(self, limit: SlowRankConfig, world_size: int, warn: Callable[[str], None]) -> None:
        self.limit = limit
        self.warn = warn
        self._behind = [0] * world_size
        self._named: set[int] = set()

    def look(self, times: Sequence[tuple[float, float]], step_seconds: float) -> None:
        """`times` are every rank's (product, data)."""
        if len(times) < 2 or not step_seconds:
            return
        products, waits = ([one[index] for one in times] for index in (0, 1))
        measured = all(products)
        # The lower of two in the middle: of two ranks, the one that is not to blame.
        usual, usual_wait = statistics.median_low(products), statistics.median_low(waits)
        for rank in range(len(times)):
            slower = products[rank] / usual - 1 if measured else 0.0
            waiting = waits[rank] - usual_wait
            late = max(slower, waiting / step_seconds)
            self._behind[rank] = self._behind[rank] + 1 if late > self.limit.behind else 0
            if self._behind[rank] >= self.limit.steps and rank not in self._named:
                self._named.add(rank)
                why = (
                    f"a product that takes the others {usual * 1000:.2f} ms takes it {products[rank] * 1000:.2f} ms"
                    if slower >= waiting / step_seconds
                    else f"it waits {waiting * 1000:.1f} ms longer for data in a step of {step_seconds * 1000:.1f} ms"
                )
                self.warn(f"rank {rank} has been {late:.0%} behind the others for {self.limit.steps} steps: {why}.")
