"""Runs of Hugging Face's Trainer under DeepSpeed's ZeRO on one GPU, drawn at random.

    python benchmarks/gpu/drawn_deepspeed.py FILE [--count 24] [--seconds 540] [--tiny]

Rows are measured and written as by `trainer_runs.py`. One rank has nothing to send: what is left of ZeRO are its
buckets, its copies, and the Python that its hooks run around parameters and modules. A third of the micro-batches have
so few tokens that the device waits for the host.
"""

import multiprocessing
import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import trainer_runs
from drawn_runs import LARGE, SMALL, TARGETS, fits
from trainer_runs import row, run_drawn

SOURCE, SEED = "deepspeed-h200-drawn", 1911
ONE_RANK = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}


def draw(count: int) -> Iterator[dict[str, Any]]:
    """`count` runs: of three, two are full training, one is LoRA."""
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        sequence = choice((256, 512, 1024, 2048, 4096))
        micro_batch = max(1, choice((256, 512, 1024, 2048, 4096, 16384)) // sequence)
        settings: dict[str, Any] = {"recompute": choice(("none", "full"))}
        model = choice(SMALL)
        if drawn % 3 == 2:
            model = choice(LARGE)
            settings["adapter"] = {"rank": choice((8, 16, 64)), "targets": choice(TARGETS)}
        case = {
            **row(model, micro_batch, sequence, "bf16-mixed", **settings),
            "source": SOURCE,
            "system": "deepspeed@2026-11",
            "strategy": choice(("zero1", "zero2", "zero2", "zero3")),
            "accum": choice((1, 2, 4)),
        }
        if fits(case):
            drawn += 1
            yield case


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    """In a process of its own: DeepSpeed leaves tensors and settings behind, which the next run would have."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "deepspeed"])
    with context.Pool(1) as pool:
        return pool.apply(trainer_runs.measure, (case, steps, shape))


if __name__ == "__main__":
    os.environ.update(ONE_RANK)
    run_drawn("Runs of Hugging Face's Trainer under DeepSpeed, drawn at random.", draw, 24, measure)
