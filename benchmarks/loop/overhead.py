"""What the training loop itself costs a step: its time outside forward, backward and the optimizer, on this CPU.

    python benchmarks/loop/overhead.py OUTPUT.json

Trains a small model through the public API, with a line of metrics for every step and for every tenth, and clocks the
two calls that are the work. What is left of a step is the loop's: the batch, the gradients' norm and clipping, the log,
signals, the watch over hangs. Clocked is the processor time of the thread that trains, which other work on the machine
does not change much; the wall's time stands beside it.
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

STEPS, WARM_UP = 300, 50
BAR = 0.003  # seconds


class Clock:
    """When each step began, and how long of it was work; `now` is whose time."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.began: list[float] = []
        self.work: list[float] = []

    def begins(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            self.began.append(self.now())
            self.work.append(0.0)
            return inner(*given, **named)

        return call

    def works(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            since = self.now()
            result = inner(*given, **named)
            self.work[-1] += self.now() - since
            return result

        return call

    def own(self) -> list[float]:
        """Of every step but the last, whose end nobody saw: what was not work."""
        periods = [after - before for before, after in zip(self.began, self.began[1:], strict=False)]
        return [period - work for period, work in zip(periods, self.work, strict=False)][WARM_UP:]


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
    TrainStep.__call__ = wall.begins(thread.begins(kept[0]))  # type: ignore[method-assign]
    ParallelModel.backward = wall.works(thread.works(kept[1]))  # type: ignore[method-assign]
    NamedOptimizer.step = wall.works(thread.works(kept[2]))  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder:
            api.train(config, runs=folder)
    finally:
        TrainStep.__call__, ParallelModel.backward, NamedOptimizer.step = kept  # type: ignore[method-assign]
    own = sorted(thread.own())
    return {
        "own_milliseconds_median": round(1e3 * statistics.median(own), 3),
        "own_milliseconds_90_percent": round(1e3 * own[int(0.9 * len(own))], 3),
        "own_milliseconds_median_by_the_wall": round(1e3 * statistics.median(wall.own()), 3),
        "work_milliseconds_median": round(1e3 * statistics.median(thread.work[WARM_UP:]), 3),
        "steps": len(own),
    }


def main() -> None:
    torch.set_num_threads(1)
    found = {f"a line every {every}": measure(every) for every in (1, 10)}
    report = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "bar_milliseconds": 1e3 * BAR,
        **found,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    if any(one["own_milliseconds_median"] > 1e3 * BAR for one in found.values()):
        raise SystemExit("The loop's own time is over the bar.")


if __name__ == "__main__":
    main()
