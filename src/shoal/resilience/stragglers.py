"""Straggler detection: find the rank that slows the others down.

All ranks take the same time per step, because fast ones wait in collectives. So each rank times what it does alone: its
wait for data, and a small matmul that is run now and then to measure the current speed of its device.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from shoal.config.schema_train import SlowRankConfig
from shoal.observe.device_clock import Mark, mark, seconds_between
from shoal.parallel.ranks import Ranks

SHARE = 0.01  # maximum share of time spent on the timing matmul
DECAY = 0.7  # of the moving averages


class RankTimer:
    """Times of this rank alone, to be shared with the others."""

    def __init__(self, ranks: Ranks) -> None:
        self.device = ranks.device
        on_device = ranks.device.type == "cuda"
        size, dtype = (2048, torch.bfloat16) if on_device else (384, torch.float32)
        self._matrix = torch.ones(size, size, dtype=dtype, device=ranks.device) if ranks.world_size > 1 else None
        self._probe: tuple[Mark, Mark] | None = None
        self._next = 0.0
        self.matmul = 0.0  # seconds; 0: not measured yet
        self.data = 0.0

    def after_step(self, data_seconds: float) -> tuple[float, float]:
        """Moving averages of the seconds for the matmul and for data."""
        self.data = DECAY * self.data + (1 - DECAY) * data_seconds
        if self._matrix is not None and time.perf_counter() >= self._next:
            self._measure(self._matrix)
        return self.matmul, self.data

    def _measure(self, matrix: torch.Tensor) -> None:
        """Read the time of the last matmul and launch the next."""
        if self._probe is not None:
            if not self._probe[1].reached():
                return
            seconds = seconds_between(*self._probe)
            self.matmul = DECAY * self.matmul + (1 - DECAY) * seconds if self.matmul else seconds
            self._next = time.perf_counter() + seconds / SHARE
        began = mark(self.device)
        torch.mm(matrix, matrix)
        self._probe = (began, mark(self.device))


class StragglerDetector:
    """Warns of a rank once, when it has been slower than the others for long enough."""

    def __init__(self, limit: SlowRankConfig, world_size: int, warn: Callable[[str], None]) -> None:
        self.limit = limit
        self.warn = warn
        self._behind = [0] * world_size
        self._named: set[int] = set()

    def update(self, times: Sequence[tuple[float, float]], step_seconds: float) -> None:
        """`times` are the (matmul, data) seconds of every rank."""
        if len(times) < 2 or not step_seconds:
            return
        matmuls, waits = ([one[index] for one in times] for index in (0, 1))
        measured = all(matmuls)
        # The lower median: of two ranks, the faster one.
        usual, usual_wait = statistics.median_low(matmuls), statistics.median_low(waits)
        for rank in range(len(times)):
            slower = matmuls[rank] / usual - 1 if measured else 0.0
            waiting = waits[rank] - usual_wait
            late = max(slower, waiting / step_seconds)
            self._behind[rank] = self._behind[rank] + 1 if late > self.limit.behind else 0
            if self._behind[rank] >= self.limit.steps and rank not in self._named:
                self._named.add(rank)
                why = (
                    f"a matmul takes {matmuls[rank] * 1000:.2f} ms, and {usual * 1000:.2f} ms on the others"
                    if slower >= waiting / step_seconds
                    else f"it waits {waiting * 1000:.1f} ms longer for data per step of {step_seconds * 1000:.1f} ms"
                )
                behind = f"{late:.0%} slower than the others for {self.limit.steps} steps"
                self.warn(f"straggler: rank {rank} has been {behind}: {why}.")
