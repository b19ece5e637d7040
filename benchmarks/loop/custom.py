"""Overhead of a custom loop (`run.steps`) against the same loop without shoal, on this CPU.

    python benchmarks/loop/custom.py OUTPUT.json

A convolutional network of about 20 ms per step is trained by both, in turns. The plain loop has what every loop has: a
DataLoader that shuffles, backward, clipping, AdamW, zero_grad, and one loss read every ten steps. Forward, backward and
optimizer step are the same in both and are timed apart; the overhead is the difference of the rest, as a share of the
plain step. Measured is the CPU time of the training thread, of the tenth of the steps that other load disturbed least.
"""

import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal

STEPS, WARMUP, ROUNDS, BATCH = 100, 20, 3, 16
WIDTH, LAYERS = 16, 3
LIMIT = 0.02  # of the step

Parts = tuple[nn.Module, torch.optim.Optimizer, "DataLoader[Any]"]


class Clock:
    """Thread time of each step, and of its forward and backward pass and update."""

    def __init__(self) -> None:
        self.periods: list[float] = []
        self.work: list[float] = []
        self._began = self._worked = 0.0

    def timed(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            since = time.thread_time()
            result = inner(*given, **named)
            self._worked += time.thread_time() - since
            return result

        return call

    def end_step(self) -> None:
        now = time.thread_time()
        self.periods.append(now - self._began)
        self.work.append(self._worked)
        self._began, self._worked = now, 0.0

    @property
    def rest(self) -> float:
        """Seconds per step outside of forward, backward and update."""
        return _tenth([a - b for a, b in zip(self.periods[WARMUP:], self.work[WARMUP:], strict=True)])

    @property
    def computed(self) -> float:
        return _tenth(self.work[WARMUP:])


def _tenth(times: list[float]) -> float:
    """The time that a tenth of the steps stays below: other load, which shares the caches, only adds to it."""
    return statistics.quantiles(times, n=10)[0]


def make(clock: Clock) -> Parts:
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Conv2d(WIDTH, WIDTH, 3, padding=1), nn.GELU())]
    model = nn.Sequential(nn.Conv2d(3, WIDTH, 3), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model.forward, optimizer.step = clock.timed(model.forward), clock.timed(optimizer.step)  # type: ignore[method-assign]
    data = TensorDataset(torch.randn(256, 3, 32, 32), torch.randn(256, 1))
    return model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=True)


def plain(clock: Clock) -> Iterator[None]:
    model, optimizer, loader = make(clock)
    step = 0
    while True:
        for inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % 10 == 0:
                float(loss)
            yield
            if step == STEPS:
                return


def custom(clock: Clock, folder: str) -> Iterator[None]:
    checkpoint = {"every": 10**9, "at_end": False}
    config: dict[str, Any] = {"train": {"steps": STEPS, "precision": "32-true"}, "log": {"every": 10, "to": []}}
    with shoal.init(run_dir=folder, overwrite=True, checkpoint=checkpoint, **config) as run:
        model, optimizer, loader = run.prepare(*make(clock))
        for inputs, targets in run.steps(loader):
            run.backward(nn.functional.mse_loss(model(inputs), targets))
            run.step(optimizer)
            yield


def measure(loop: Callable[[Clock], Iterator[None]]) -> Clock:
    clock, backward = Clock(), torch.autograd.backward
    torch.autograd.backward = clock.timed(backward)
    try:
        for _ in loop(clock):
            clock.end_step()
    finally:
        torch.autograd.backward = backward
    return clock


def main() -> None:
    torch.set_num_threads(1)
    rounds = []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            rounds.append((measure(plain), measure(lambda clock, folder=folder: custom(clock, folder))))  # type: ignore[misc]
    bare, ours = (min(one[side].rest for one in rounds) for side in (0, 1))
    step = bare + min(one[0].computed for one in rounds)
    report = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__},
        "step_milliseconds": round(1e3 * step, 3),
        "rest_of_plain_milliseconds": round(1e3 * bare, 3),
        "rest_of_custom_milliseconds": round(1e3 * ours, 3),
        "overhead": round((ours - bare) / step, 4),
        "limit": LIMIT,
        "steps": STEPS - WARMUP,
        "rounds": ROUNDS,
    }
    text = json.dumps(report, indent=2)
    print(text)
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(text + "\n")
    if ours - bare > LIMIT * step:
        raise SystemExit("The overhead is above the limit.")


if __name__ == "__main__":
    main()
