"""Where the time of a step of another system goes on the device: kernels by name.

    python benchmarks/gpu/drawn_kernels.py SCRIPT FILE [--only PATTERN ...] [--seconds 400]

SCRIPT is one of the `drawn_*.py` whose runs have a process and a `Clock` of their own, such as `drawn_litgpt`. A line
of FILE is a run that it draws: `step_ms`, the median; `kernels`, milliseconds and launches per step of those that take
longest, in steps under the profiler, which slows down the host and not the kernels; `busy_ms`, of all of them.
"""

import argparse
import importlib
import json
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from peers.clock import Clock
from trainer_kernels import LISTED, PROFILED, STEPS, kernel_times
from trainer_runs import WARMUP, name


class ProfiledClock(Clock):
    """Profiles the steps after the measured ones."""

    latest: "ProfiledClock"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        ProfiledClock.latest = self

    def step_done(self, loss: torch.Tensor) -> None:
        super().step_done(loss)
        if len(self._ends) == WARMUP + STEPS:
            torch.cuda.synchronize()
            self.profile.start()
        elif len(self._ends) == WARMUP + STEPS + PROFILED:
            torch.cuda.synchronize()
            self.profile.stop()


def measure(script: str, case: dict[str, Any]) -> dict[str, Any]:
    module = importlib.import_module(script)
    module.Clock = ProfiledClock  # type: ignore[attr-defined]
    parts = (case, WARMUP + STEPS + PROFILED)
    # What the third argument is, a shape or whether it is a tiny one, the script says.
    tiny = module.measure_here.__code__.co_varnames[2] == "tiny"
    module.measure_here(*parts, False if tiny else case["model"])
    clock = ProfiledClock.latest
    kernels = kernel_times(clock.profile)
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:LISTED]
    seconds = clock.result()["step_seconds"][WARMUP : WARMUP + STEPS]
    return {
        "name": name(case),
        "step_ms": round(1e3 * statistics.median(seconds), 2),
        "busy_ms": round(sum(spent for spent, _ in kernels.values()), 2),
        "launches": sum(count for _, count in kernels.values()),
        "kernels": {kernel: [round(spent, 3), count] for kernel, (spent, count) in longest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a step of another system goes on the device.")
    parser.add_argument("script")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATTERN")
    parser.add_argument("--seconds", type=float, default=400)
    args = parser.parse_args()
    began = time.monotonic()
    for case in importlib.import_module(args.script).draw(24):
        if not any(pattern in name(case) for pattern in args.only):
            continue
        if time.monotonic() - began > args.seconds:
            print("no time left", flush=True)
            return
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, args.script, case).result()
        with args.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{found['name']}: step {found['step_ms']} ms, busy {found['busy_ms']} ms", flush=True)


if __name__ == "__main__":
    main()
