"""The time that the host takes to launch a block, as in `shoal bench hardware`, between the runs of another process."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from typing import Any

WARMUP, STEPS = 2, 10


class HostProbe:
    """A process that keeps its models on the device, so that a measurement takes less than a second.

    It has CUDA to itself: those that measure runs may fork, and so must not have begun with CUDA.
    """

    def __init__(self) -> None:
        self.process = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))

    def block_ms(self) -> float:
        return self.process.submit(measure).result()


def measure() -> float:
    from shoal.bench.host import measure_models

    device, models = build()
    return measure_models(models, device, warmup=WARMUP, steps=STEPS).block_ms


@cache
def build() -> tuple[Any, Any]:
    from shoal.bench.host import build_models
    from shoal.launch.join import first_device

    device = first_device()
    return device, build_models(device)
