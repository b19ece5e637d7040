"""The time that this host takes to launch kernels, which a small model's device waits for."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from shoal.bench.device_speed import half_dtype
from shoal.catalogue.shapes import shape_from_sizes
from shoal.models.families import transformers_config

# So few tokens that no kernel takes as long as its launch. The time of a block is the difference between two models.
TOKENS, FEW, MANY = 64, 4, 12
SIZES: dict[str, Any] = {"hidden": 1024, "heads": 16, "ffn": 2816, "vocab": 2048, "positions": 2048, "tied": True}
# The same on a CPU, which computes what it launches itself.
CPU_TOKENS = 8
CPU_SIZES: dict[str, Any] = {"hidden": 32, "heads": 2, "ffn": 64, "vocab": 64, "positions": 64, "tied": True}
WARMUP, STEPS = 5, 40
# Steps of which the slow tenth takes so much longer than the fast tenth belong to a host that is busy otherwise. On one
# that is not, a virtual machine with an H200, it takes 1.4 to 1.6 times as long.
UNSTEADY = 2.0


@dataclass(frozen=True)
class HostTimes:
    """Seconds of every step of both models."""

    few: Sequence[float]
    many: Sequence[float]

    @property
    def block_ms(self) -> float:
        """Milliseconds per block, forward and backward."""
        return 1e3 * (statistics.median(self.many) - statistics.median(self.few)) / (MANY - FEW)

    @property
    def spread(self) -> float:
        """How many times as long the slow tenth of the steps takes as the fast tenth."""
        deciles = statistics.quantiles(self.many, n=10)
        return deciles[-1] / deciles[0]

    @property
    def caveats(self) -> list[str]:
        if self.spread < UNSTEADY:
            return []
        return [
            f"The slow tenth of the steps took {self.spread:.1f} times as long as the fast tenth: something else keeps "
            "this host busy, and training would wait for it too."
        ]


def measure_host(device: torch.device, report: Callable[[str], None]) -> HostTimes:
    """Steps of two small Llamas on `device`, in turns, so that a change of the host's speed reaches both."""
    report(f"measuring {STEPS} steps of {FEW} and of {MANY} blocks …")
    return measure_models(build_models(device), device, warmup=WARMUP, steps=STEPS)


def build_models(device: torch.device) -> dict[int, torch.nn.Module]:
    """By their number of blocks."""
    return {blocks: _build(blocks, device) for blocks in (FEW, MANY)}


def measure_models(models: dict[int, torch.nn.Module], device: torch.device, *, warmup: int, steps: int) -> HostTimes:
    length = TOKENS if device.type == "cuda" else CPU_TOKENS
    tokens = torch.zeros((1, length), dtype=torch.long, device=device)
    found: dict[int, list[float]] = {FEW: [], MANY: []}
    for step in range(warmup + steps):
        for blocks, model in models.items():
            seconds = _step(model, tokens)
            if step >= warmup:
                found[blocks].append(seconds)
    return HostTimes(found[FEW], found[MANY])


def _build(blocks: int, device: torch.device) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    sizes, dtype = (SIZES, half_dtype(device)) if device.type == "cuda" else (CPU_SIZES, torch.float32)
    config = transformers_config(shape_from_sizes(family="llama", layers=blocks, **sizes))
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    found: torch.nn.Module = model.train()
    return found


def _step(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Seconds of a forward and a backward pass, to the end of the last kernel."""
    _wait(tokens.device)
    began = time.perf_counter()
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    _wait(tokens.device)
    seconds = time.perf_counter() - began
    model.zero_grad(set_to_none=True)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
