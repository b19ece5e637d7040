"""Simulate long runs whose devices fail, and compare them with the goodput that `shoal plan` forecasts.

    python benchmarks/goodput/simulate.py benchmarks/goodput/simulated.json

Every device has a clock of its own; when it runs out, the run is interrupted. The events are: a save begins, training
goes on, the checkpoint is complete, a device fails, a restart has ended. Nothing of the formula is in the simulation.
"""

import heapq
import json
import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import api
from shoal.plan.goodput import Conditions

# Each with the least number of interruptions to simulate: a failure is rare on few devices, and saves are many.
RUNS = {
    8: (["model.shape=llama3-8b", "hardware.nodes=1", "train.global_batch=64"], 400),
    512: (["model.shape=llama3-70b", "hardware.nodes=64", "train.global_batch=1024"], 2000),
    16_384: (
        [
            "model.shape=llama3.1-405b",
            "hardware.nodes=2048",
            "train.global_batch=4096",
            "parallel.tp=8",
            "parallel.pp=16",
            "train.recompute=full",
        ],
        6000,
    ),
}
COMMON = ["hardware.gpu=h100-80gb", "hardware.devices=8", "data.max_length=8192", "checkpoint.every=auto"]
# Multiples of the best interval: it must be better than its neighbours. The shortest one is less than it takes to write
# a checkpoint, where saves are asynchronous.
INTERVALS = (0.02, 0.25, 1.0, 4.0)


@dataclass
class Simulated:
    """Totals, in seconds."""

    seconds: float = 0.0
    useful: float = 0.0
    interruptions: int = 0

    @property
    def lost(self) -> float:
        return 1 - self.useful / self.seconds


class Devices:
    """Devices that fail at random, each after an exponentially distributed time, and are replaced."""

    def __init__(self, count: int, mean: float, chance: random.Random) -> None:
        self.mean, self.chance = mean, chance
        self.failures = [chance.expovariate(1 / mean) for _ in range(count)]
        heapq.heapify(self.failures)

    @property
    def next_failure(self) -> float:
        return self.failures[0]

    def replace(self) -> float:
        """The device that fails next is replaced; returns when it fails."""
        at = self.failures[0]
        heapq.heapreplace(self.failures, at + self.chance.expovariate(1 / self.mean))
        return at


def simulate(conditions: Conditions, interval: float, devices: int, interruptions: int, seed: int) -> Simulated:
    """A run of so many interruptions that saves after every `interval` of training, once the last save is complete."""
    fleet = Devices(devices, conditions.mtbf * devices, random.Random(seed))
    found, now, progress, kept = Simulated(), 0.0, 0.0, 0.0
    while found.interruptions < interruptions:
        begun: list[tuple[float, float]] = []  # checkpoints since the last restart: (complete at, progress in it)
        while True:
            saves_at = max(now + interval, begun[-1][0]) if begun else now + interval
            goes_on_at = saves_at + conditions.blocked
            if fleet.next_failure < goes_on_at:
                break
            now, progress = goes_on_at, progress + interval
            begun.append((goes_on_at + conditions.written, progress))
        failed_at = fleet.replace()
        for complete_at, holds in begun:
            if complete_at <= failed_at:
                kept = holds
        progress, found.interruptions = kept, found.interruptions + 1
        now = failed_at + conditions.restart
        while fleet.next_failure < now:  # another device fails during the restart, which begins anew
            now = fleet.replace() + conditions.restart
            found.interruptions += 1
    found.seconds, found.useful = now, kept
    return found


def compare(devices: int) -> dict[str, Any]:
    """One run, at several intervals, with asynchronous saves as planned and with synchronous ones."""
    settings, interruptions = RUNS[devices]
    rows = []
    for mode in ("true", "false"):
        goodput = api.plan(
            api.load_config(None, [*settings, *COMMON, f"checkpoint.async={mode}"], planned=True)
        ).goodput
        conditions, best = goodput.conditions, goodput.best_every * goodput.step_seconds
        for multiple in INTERVALS:
            interval = best * multiple
            ran = simulate(conditions, interval, devices, interruptions, seed=1)
            forecast = 1 - conditions.share(interval)
            rows.append(
                {
                    "async": mode == "true",
                    "interval_seconds": round(interval, 2),
                    "times_best": round(interval / best, 3),
                    "interruptions": ran.interruptions,
                    "interruptions_forecast": round(ran.seconds / conditions.mtbf, 1),
                    "lost_share": round(ran.lost, 7),
                    "lost_share_forecast": round(forecast, 7),
                    # Of a sum over so many interruptions, to be compared with the difference.
                    "off": round(forecast / ran.lost - 1, 4),
                    "expected_scatter": round(1 / math.sqrt(ran.interruptions), 4),
                }
            )
    return {
        "devices": devices,
        "settings": [*settings, *COMMON],
        "mtbf_seconds": round(conditions.mtbf, 1),
        "restart_seconds": conditions.restart,
        "rows": rows,
    }


def main(output: Path) -> None:
    results = []
    for devices in RUNS:
        results.append(compare(devices))
        for row in results[-1]["rows"]:
            print(devices, row, file=sys.stderr)
    output.write_text(json.dumps({"runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
