"""Time, memory and loss of each step, measured without synchronizing host and device."""

import math
import time
from typing import Any

import torch
from torch import Tensor

from peers.task import Task


class Clock:
    """Call `begin` before the first step and `step_done` after each.

    On CUDA the end of a step is an event, which is read after the last step: a synchronization per step would slow down
    the loops that avoid one.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.cuda = torch.cuda.is_available()
        self.first_step_seconds = 0.0
        self._ends: list[Any] = []
        self._losses: list[Tensor] = []

    def begin(self) -> None:
        if self.cuda:
            # Memory used for building the model does not count.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def step_done(self, loss: Tensor) -> None:
        self._losses.append(loss.detach())
        if self.cuda:
            end = torch.cuda.Event(enable_timing=True)
            end.record()
            self._ends.append(end)
        else:
            self._ends.append(time.perf_counter())
        if len(self._ends) == 1:
            if self.cuda:
                torch.cuda.synchronize()
            self.first_step_seconds = time.time() - self.task.started

    def result(self) -> dict[str, Any]:
        """All measurements of the run. The caller decides which steps are warmup."""
        if self.cuda:
            torch.cuda.synchronize()
        seconds = [self._between(one, other) for one, other in zip(self._ends, self._ends[1:], strict=False)]
        return {
            # The first step has no time here, because no step ended before it. It is always a warmup step.
            "step_seconds": [None, *seconds],
            # JSON has no NaN.
            "losses": [value if math.isfinite(value) else None for value in map(float, self._losses)],
            "first_step_seconds": self.first_step_seconds,
            "allocated_gib": torch.cuda.max_memory_allocated() / 2**30 if self.cuda else None,
            "reserved_gib": torch.cuda.max_memory_reserved() / 2**30 if self.cuda else None,
        }

    def _between(self, one: Any, other: Any) -> float:
        return one.elapsed_time(other) / 1e3 if self.cuda else other - one
