"""A warning if training waits for data."""

import os
from collections.abc import Callable

from shoal.config.schema import DataConfig
from shoal.observe.metrics import Line
from shoal.train.hooks import Hook, LogInterval, RunStart

SHARE = 0.05  # of the step time
WARMUP = 3  # steps: they wait for the first batches, which nobody prefetched
STEPS = 10  # judged together: a single step may wait for the disk


class SlowDataWarning(Hook):
    """Warns once, if rank 0 waits for data for more than 5% of the time of at least ten steps."""

    def __init__(self, data: DataConfig, warn: Callable[[str], None]) -> None:
        self.data = data
        self.warn = warn
        self._first = 0
        self._steps = 0
        self._waited = self._seconds = 0.0
        self._warned = False

    def on_run_start(self, start: RunStart) -> None:
        self._first = start.step + WARMUP

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        waited = line["data_seconds"]
        if self._warned or waited is None or interval.step - interval.steps < self._first:
            return
        self._steps += interval.steps
        self._waited += waited * interval.steps
        self._seconds += interval.seconds
        if self._steps < STEPS:
            return
        if self._waited > SHARE * self._seconds:
            self._warned = True
            self.warn(
                f"training waits for data {self._waited / self._seconds:.0%} of the time "
                f"({self._waited / self._steps:.4f} s of each step of {self._seconds / self._steps:.4f} s): "
                f"{remedy(self.data)}."
            )
        self._steps, self._waited, self._seconds = 0, 0.0, 0.0


def remedy(data: DataConfig) -> str:
    """What makes data arrive faster."""
    cores = os.cpu_count() or 1
    remedies = []
    if data.workers == 0:
        remedies.append("set data.workers: 2, so that batches are prepared in the background")
    elif data.workers < cores:
        remedies.append(f"raise data.workers (now {data.workers})")
    if data.streaming:
        remedies.append("set data.streaming: false, which tokenizes before training")
        remedies.append("put the data on a faster disk")
    else:
        remedies.append("put the prepared data on a faster disk (SHOAL_CACHE=FOLDER)")
    return ", or ".join(remedies)
