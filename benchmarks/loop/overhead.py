"""Overhead of the training loop per step: its time outside of forward, backward and optimizer, on this CPU.

    python benchmarks/loop/overhead.py OUTPUT.json

Trains a small model with the public API, logging every step and every tenth, and times forward and backward and the
optimizer step. The rest of a step is overhead: the batch, gradient norm and clipping, logging, signals, the watchdog.
Measured is the CPU time of the training thread, which depends little on other load; wall time is given in addition.
"""

import json
import os
import platform
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from shoal import api
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.model import ParallelModel
from shoal.train.step import TrainStep

STEPS, WARMUP = 300, 50
LIMIT = 0.003  # seconds


class Clock:
    """When each step started, and how long its computation took; `now` is the clock to read."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.began: list[float] = []
        self.work: list[float] = []

    def wrap_step(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.began.append(self.now())
            self.work.append(0.0)
            return inner(*args, **kwargs)

        return call

    def wrap_work(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            since = self.now()
            result = inner(*args, **kwargs)
            self.work[-1] += self.now() - since
            return result

        return call

    def overhead(self) -> list[float]:
        """Overhead of every step but the last, whose end is not recorded."""
        periods = [after - before for before, after in zip(self.began, self.began[1:], strict=False)]
        return [period - work for period, work in zip(periods, self.work, strict=False)][WARMUP:]


def measure(log_every: int) -> dict[str, float]:
    library = sysconfig.get_paths()["stdlib"]
    config = api.config_from_mapping(
        {
            "name": "loop",
            "model": {
                "shape": {"family": "llama", "hidden": 128, "layers": 4, "heads": 4, "vocab": 260, "positions": 256},
                "tokenizer": "bytes",
            },
            "data": {"source": "text", "path": f"{library}/[a-c]*.py", "max_length": 128, "validation": 0},
            "train": {"steps": STEPS, "global_batch": 2, "micro_batch": 2, "lr": 1e-3, "precision": "32-true"},
            "checkpoint": {"every": 10**9, "at_end": False},
            "log": {"every": log_every, "to": []},
        }
    )
    thread, wall = Clock(time.thread_time), Clock(time.perf_counter)
    kept = (TrainStep.__call__, ParallelModel.backward, NamedOptimizer.step)
    TrainStep.__call__ = wall.wrap_step(thread.wrap_step(kept[0]))  # type: ignore[method-assign]
    ParallelModel.backward = wall.wrap_work(thread.wrap_work(kept[1]))  # type: ignore[method-assign]
    NamedOptimizer.step = wall.wrap_work(thread.wrap_work(kept[2]))  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            api.train(config, runs=folder)
    finally:
        TrainStep.__call__, ParallelModel.backward, NamedOptimizer.step = kept  # type: ignore[method-assign]
    overhead = sorted(thread.overhead())
    return {
        "overhead_milliseconds_median": round(1e3 * statistics.median(overhead), 3),
        "overhead_milliseconds_90_percent": round(1e3 * overhead[int(0.9 * len(overhead))], 3),
        "overhead_milliseconds_median_wall": round(1e3 * statistics.median(wall.overhead()), 3),
        "compute_milliseconds_median": round(1e3 * statistics.median(thread.work[WARMUP:]), 3),
        "steps": len(overhead),
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {f"log every {every}": measure(every) for every in (1, 10)}
    report = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "limit_milliseconds": 1e3 * LIMIT,
        **found,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    if any(one["overhead_milliseconds_median"] > 1e3 * LIMIT for one in found.values()):
        raise SystemExit("The overhead is above the limit.")


if __name__ == "__main__":
    main()
