"""Plain PyTorch loops around transformers' models, as many repositories have them, that a random generator chose.

    python benchmarks/gpu/drawn_loops.py FILE [--count 32] [--seconds 540] [--tiny]

Rows are measured and written as by `trainer_runs.py`. Every setting is drawn on its own, with a fixed seed; a run is
left out only where the forecast says that it needs more than 120 GiB or that its steps take more than 4 s.
"""

import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from drawn_runs import SMALL, fits
from peers.clock import Clock
from peers.models import build, device, resolve_shape
from peers.task import Task
from trainer_runs import measured_row, row, run_drawn

SOURCE, SEED = "loops-h200-drawn", 1118
ENCODERS = ("bert-base", "bert-large")
# Those that torch.compile has done with before the others have run.
COMPILED = ("gpt2", "pythia-160m", "pythia-410m", "pythia-1b", "llama3.2-1b", "bert-base", "bert-large")
COMPILED += ("tinyllama-1.1b",)


def draw(count: int) -> Iterator[dict[str, Any]]:
    """`count` runs, every fourth of a compiled model."""
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        compiled = drawn % 4 == 3
        model = choice(COMPILED if compiled else (*SMALL, *ENCODERS))
        sequence = choice((128, 256, 512) if model in ENCODERS else (256, 512, 1024, 2048, 4096))
        micro_batch = max(1, choice((2048, 4096, 8192, 16384, 32768)) // sequence)
        precision = choice(("bf16-true", "bf16-mixed", "bf16-mixed", "32-true"))
        recompute = choice(("none", "none", "full"))
        attention = choice(("sdpa", "sdpa", "scores"))
        foreach = choice((True, False))
        case = row(model, micro_batch, sequence, precision, recompute="none" if compiled else recompute)
        case |= {"source": SOURCE, "accum": choice((1, 1, 2)), "compiled": compiled}
        case["system"] = system(precision, compiled=compiled, foreach=foreach)
        if attention == "scores":
            case["attention"] = attention
        if fits(case):
            drawn += 1
            yield case


def system(precision: str, *, compiled: bool, foreach: bool) -> str:
    """Its name in `nearest/`."""
    parts = ["autocast" * (precision == "bf16-mixed"), "compiled" * compiled, "foreach" * foreach]
    return "-".join(["plain-loop", *filter(None, parts)])


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    length, batch, accum = case["sequence"], case["micro_batch"], case["accum"]
    task = Task("loop", shape, length, batch, steps, "", time.time())
    dtype = torch.bfloat16 if case["precision"] == "bf16-true" else torch.float32
    model = make_model(task, dtype, "eager" if case.get("attention") == "scores" else "sdpa")
    if case["recompute"] == "full":
        model.gradient_checkpointing_enable()
    clock = Clock(task)
    foreach = case["system"].endswith("foreach")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=None if foreach or not clock.cuda else True)
    called = torch.compile(model, backend="inductor" if clock.cuda else "aot_eager") if case["compiled"] else model
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(resolve_shape(shape).vocab, (steps * accum, batch, length), generator=generator)

    def loss_of(inputs: Tensor) -> Tensor:
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=case["precision"] == "bf16-mixed"):
            found: Tensor = called(input_ids=inputs, labels=inputs).loss
        return found / accum

    clock.begin()
    for step in range(steps):
        for part in range(accum):
            inputs = tokens[step * accum + part]
            if clock.cuda:
                inputs = inputs.pin_memory().to(device(), non_blocking=True)
            loss = loss_of(inputs)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.step_done(loss)
    found = clock.result()
    return measured_row(case, found)


def make_model(task: Task, dtype: torch.dtype, attention: str) -> Any:
    """The language model on the device: a causal one, or BERT with the head of its masked tokens."""
    if task.shape not in ENCODERS:
        return build(task, dtype, attention)
    from transformers import AutoModelForMaskedLM

    from shoal.models.families import transformers_config

    settings = transformers_config(resolve_shape(task.shape))
    with device():
        model = AutoModelForMaskedLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    return model.train()


if __name__ == "__main__":
    run_drawn("Plain PyTorch loops that a random generator chose.", draw, 32, measure)
