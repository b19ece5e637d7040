"""Mixtures of experts under Hugging Face's Trainer, drawn at random: published architectures with fewer blocks.

    python benchmarks/gpu/drawn_mixtures.py FILE [--count 18] [--seconds 540] [--tiny]

Rows are measured and written as by `trainer_runs.py`, with the number of blocks. Of transformers 5, experts run through
grouped matmuls, as by default, or one after the other (`experts` is "eager"). Until then they are modules of their own,
which run one after the other ("modules"). Random numbers are added to what routers read: initial weights would
send nearly all tokens to a few experts, which trained ones do not.
"""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import trainer_runs
from drawn_runs import TARGETS, fits
from trainer_runs import row, run_drawn

SOURCE, SEED = "mixtures-h200-drawn", 3011
NOISE = 8
MODULES = transformers.__version__.startswith("4.")
# The catalogue's names, with transformers' type of config and how its defaults differ from the published model.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": ("qwen3_moe", {"moe_intermediate_size": 768, "num_key_value_heads": 4, "head_dim": 128}),
    "mixtral-8x7b": ("mixtral", {}),
}
# What `experts` is to the forecast.
TRAITS: dict[str, dict[str, Any]] = {
    "grouped_mm": {"masked_experts": 3},  # as transformers 5.17 has it
    "eager": {"experts": "slices"},
    "modules": {"experts": "modules", "reentrant": True, "logit_bytes": 14.0},
}
TINY = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}
TINY |= {"intermediate_size": 64, "moe_intermediate_size": 32}


def draw(count: int) -> Iterator[dict[str, Any]]:
    """`count` runs: of three, two are full training, one is LoRA on attention."""
    choice = random.Random(SEED).choice
    drawn = 0
    while drawn < count:
        sequence = choice((512, 1024, 2048, 4096))
        micro_batch = max(1, choice((1024, 2048, 4096, 8192, 16384)) // sequence)
        settings: dict[str, Any] = {"layers": choice((2, 4, 8)), "recompute": choice(("none", "full"))}
        settings["experts"] = choice(("grouped_mm", "grouped_mm", "eager"))
        if MODULES:
            settings["experts"] = "modules"
        precision = choice(("bf16-true", "bf16-true", "bf16-mixed"))
        if drawn % 3 == 2:
            precision = "bf16-true"
            settings["adapter"] = {"rank": choice((8, 16, 64)), "targets": choice(TARGETS[1:])}
        settings["traits"] = TRAITS[settings["experts"]]
        case = row(choice(tuple(MODELS)), micro_batch, sequence, precision, **settings) | {"source": SOURCE}
        if fits(case):
            drawn += 1
            yield case


def measure(case: dict[str, Any], steps: int, shape: Any) -> dict[str, Any]:
    def mixture(_: Any, dtype: torch.dtype, attention: str) -> Any:
        kind, settings = MODELS[case["model"]]
        tiny = TINY if isinstance(shape, dict) else {}
        config = transformers.AutoConfig.for_model(
            kind, **{**settings, **tiny}, num_hidden_layers=case["layers"], use_cache=False
        )
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
        if not MODULES:
            model.set_experts_implementation(case["experts"])
        elif "adapter" in case:
            model.enable_input_require_grads()  # transformers 5 does so itself
        for module in (one for name, one in model.named_modules() if name.endswith(".gate")):
            module.register_forward_pre_hook(spread)
        return model.train()

    return trainer_runs.measure(case, steps, shape, mixture)


def spread(_: Any, read: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return (torch.add(read[0], torch.randn_like(read[0]), alpha=NOISE), *read[1:])


if __name__ == "__main__":
    run_drawn("Mixtures of experts under Hugging Face's Trainer.", draw, 18, measure)
