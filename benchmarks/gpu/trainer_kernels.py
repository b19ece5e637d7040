"""Where the time of a Trainer's step goes on the device: kernels by name, and the time between two training steps.

    python benchmarks/gpu/trainer_kernels.py FILE [--only PATTERN ...] [--seconds 400]

For runs of `drawn_runs.py`, `trainer_runs.py` and `drawn_mixtures.py`. `step_ms`: of the whole step. `between_ms`: from
the end of a backward pass to the next forward pass, on the device, that is the optimizer and what the host does
meanwhile. `kernels`: milliseconds and launches per step of the 40 that take longest, by name, in steps under the
profiler, which slows down the host and not the kernels; `busy_ms` is of all of them.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import drawn_mixtures
import trainer_runs
from drawn_runs import draw
from trainer_runs import WARMUP, MeasuredTrainer, name

STEPS, PROFILED, LISTED, LONGEST_NAME = 8, 2, 40, 150
NOISE = ("void ", "at::native::", "(anonymous namespace)::", "<unnamed>::", "c10::", "std::")


class ProfiledTrainer(MeasuredTrainer):
    """Records when forward passes begin and backward passes end, and profiles the last steps."""

    latest: "ProfiledTrainer"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.marks: list[tuple[Any, Any]] = []
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        ProfiledTrainer.latest = self

    def training_step(self, *arguments: Any, **named: Any) -> torch.Tensor:
        if len(self.marks) == (WARMUP + STEPS) * self.args.gradient_accumulation_steps:
            torch.cuda.synchronize()
            self.profile.start()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = super().training_step(*arguments, **named)
        end.record()
        self.marks.append((begin, end))
        return loss


def measure(case: dict[str, Any]) -> dict[str, Any]:
    train = drawn_mixtures.measure if "experts" in case else trainer_runs.measure
    train(case, WARMUP + STEPS + PROFILED, case["model"])
    trainer = ProfiledTrainer.latest
    torch.cuda.synchronize()
    trainer.profile.stop()
    kernels = kernel_times(trainer.profile)
    # Of each step, the beginning of the first micro-batch, and the end of the last one before it.
    micro, measured = trainer.args.gradient_accumulation_steps, range(WARMUP, WARMUP + STEPS)
    begins = [trainer.marks[step * micro][0] for step in measured]
    between = [trainer.marks[step * micro - 1][1].elapsed_time(trainer.marks[step * micro][0]) for step in measured]
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])[:LISTED]
    return {
        "name": name(case),
        "step_ms": round(statistics.median(one.elapsed_time(other) for one, other in pairwise(begins)), 2),
        "between_ms": round(statistics.median(between), 2),
        "busy_ms": round(sum(spent for spent, _ in kernels.values()), 2),
        "launches": sum(count for _, count in kernels.values()),
        "kernels": {kernel: [round(spent, 3), count] for kernel, (spent, count) in longest},
    }


def kernel_times(profile: Any) -> dict[str, list[float]]:
    """Milliseconds and launches per profiled step, by kernel."""
    kernels: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernel = event.name
            for noise in NOISE:
                kernel = kernel.replace(noise, "")
            found = kernels[kernel[:LONGEST_NAME]]
            found[0] += event.device_time_total / 1e3 / PROFILED
            found[1] += 1 / PROFILED
    return kernels


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a Trainer's step goes on the device.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="PATTERN")
    parser.add_argument("--seconds", type=float, default=400)
    args = parser.parse_args()
    trainer_runs.MeasuredTrainer = ProfiledTrainer  # type: ignore[misc]
    began = time.monotonic()
    for case in (*draw(36), *trainer_runs.cases(), *drawn_mixtures.draw(18)):
        if not any(pattern in name(case) for pattern in args.only):
            continue
        if time.monotonic() - began > args.seconds:
            print("no time left", flush=True)
            return
        found = measure(case)
        del ProfiledTrainer.latest
        gc.collect()
        torch.cuda.empty_cache()
        with args.file.open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(f"{found['name']}: step {found['step_ms']} ms, busy {found['busy_ms']} ms", flush=True)


if __name__ == "__main__":
    main()
