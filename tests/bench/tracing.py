"""Traces one rank of a job in the test process, with a fake process group."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist

from shoal.api import load_config
from shoal.bench.forecast import uncompiled_choice
from shoal.bench.trace import Traced, trace
from shoal.plan.resolved import ResolvedRun

# Large enough that rounding does not matter, small enough to be traced in a second.
SMALL = "{family: llama, hidden: 512, layers: 2, heads: 8, kv_heads: 4, ffn: 1376, vocab: 32000, tied: false}"
WIDE = "{family: llama, hidden: 1024, layers: 3, heads: 16, kv_heads: 4, ffn: 4096, vocab: 16000, tied: true}"
NEOX = "{family: neox, hidden: 512, layers: 3, heads: 8, ffn: 2048, vocab: 32000}"
UNALIGNED = NEOX.replace("32000", "50257")  # this vocabulary is padded
LONG = ("data.max_length=2048", "hardware.gpu=h100-80gb", "train.micro_batch=1")


@contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    if world_size == 1:
        yield
        return
    dist.init_process_group("fake", rank=0, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@cache
def trace_run(world_size: int, shape: str, *overrides: str) -> tuple[ResolvedRun, Traced]:
    """Trace the run of these overrides, by default with one sequence per rank and one gradient accumulation step."""
    global_batch = (
        [] if any(one.startswith("train.global_batch") for one in overrides) else [f"train.global_batch={world_size}"]
    )
    config = load_config(None, [f"model.shape={shape}", "model.tokenizer=bytes", *LONG, *global_batch, *overrides])
    choice = uncompiled_choice(config, world_size)
    with fake_process_group(world_size):
        return choice, trace(choice)


def relative_error(traced: Any, expected: float) -> float:
    return abs(traced / expected - 1)
