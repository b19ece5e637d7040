"""Runs of Hugging Face's Trainer that a random generator chose: nobody corrected the forecast with them in view.

    python benchmarks/gpu/drawn_runs.py FILE [--count 32] [--seconds 540] [--tiny]

Rows are measured and written as by `trainer_runs.py`. Every setting is drawn on its own, with a fixed seed; a run is
left out only where the forecast says that it needs more than 120 GiB or that its steps take more than 4 s.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from plan_published import read_lines
from trainer_runs import LINEAR, name, row, run_drawn

from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.terms import GIB

SOURCE, SEED = "trainer-h200-drawn", 2611
SMALL = ("gpt2", "pythia-160m", "pythia-410m", "pythia-1b", "pythia-2.8b", "smollm2-135m", "tinyllama-1.1b")
SMALL += ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "llama3.2-1b")
SMALL += ("llama3.2-3b",)
# The models with adapters: their linear layers have Llama's names.
LARGE = (*SMALL[6:], "mistral-7b", "llama2-7b", "llama3.1-8b", "qwen2.5-7b", "qwen3-8b", "llama2-13b", "qwen2.5-14b")
TARGETS = (LINEAR, LINEAR[:4], ["q_proj", "v_proj"])
ROOM_GIB, LONGEST_SECONDS = 120, 4


def draw(count: int) -> Iterator[dict[str, Any]]:
    """`count` runs, a third each of full training, LoRA and QLoRA."""
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        kind = ("full", "LoRA", "QLoRA")[drawn % 3]
        sequence = choice((256, 512, 1024, 2048, 4096, 8192))
        micro_batch = max(1, choice((1024, 2048, 4096, 8192, 16384, 32768)) // sequence)
        settings: dict[str, Any] = {"recompute": choice(("none", "full"))}
        precision, model = choice(("bf16-true", "bf16-mixed")), choice(SMALL)
        if kind == "full":
            settings["optimizer"] = choice(("adamw", "adamw", "adamw8bit", "adafactor"))
        else:
            precision, model = "bf16-true", choice(LARGE)
            settings["adapter"] = {"rank": choice((8, 16, 64)), "targets": choice(TARGETS)}
        if kind == "QLoRA":
            settings["adapter"] |= {"quantize": "nf4", "double_quantized": True, "upcasts": True}
        case = {
            **row(model, micro_batch, sequence, precision, **settings),
            "source": SOURCE,
            "accum": choice((1, 1, 2)),
        }
        if fits(case):
            drawn += 1
            yield case


def fits(case: dict[str, Any]) -> bool:
    [found] = read_lines([case | {"unknown": ""}])
    assert found.run is not None, name(case)
    tokens = case["micro_batch"] * case["sequence"] * case["accum"]
    quick = tokens / forecast_speed(found.run).tokens_per_second_per_gpu < LONGEST_SECONDS
    room = forecast_memory(found.run).reserved < ROOM_GIB * GIB
    return quick and room and case["sequence"] <= found.run.shape.positions


if __name__ == "__main__":
    run_drawn("Runs of Hugging Face's Trainer that a random generator chose.", draw, 32)
