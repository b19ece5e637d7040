"""The time that this host takes to launch kernels: what a small model's device waits for, and the forecast's
`hardware.host_block_ms`."""

import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.bench.output import envelope
from shoal.catalogue.shapes import shape_from_sizes
from shoal.launch.join import cuda_devices, first_device
from shoal.mistakes import UserMistake
from shoal.models.families import transformers_config
from shoal.plan.speed.host import EAGER_BLOCK_HOST

# So few tokens that no kernel takes as long as its launch. The time of a block is the difference between two models.
TOKENS, FEW, MANY = 64, 4, 12
SIZES: dict[str, Any] = {"hidden": 1024, "heads": 16, "ffn": 2816, "vocab": 2048, "positions": 2048, "tied": True}
WARMUP, STEPS = 5, 40
# Steps of which the slow tenth takes so much longer than the fast tenth belong to a host that is busy otherwise. On one
# that is not, a virtual machine with an H200, it takes 1.4 to 1.6 times as long.
UNSTEADY = 2.0


@dataclass(frozen=True)
class HostReport:
    """Seconds of every step of both models."""

    few: Sequence[float]
    many: Sequence[float]
    device: str
    processor: str

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

    def as_dict(self) -> dict[str, Any]:
        rows = [
            {"blocks": blocks, "step_ms": round(1e3 * statistics.median(seconds), 3), "steps": len(seconds)}
            for blocks, seconds in ((FEW, self.few), (MANY, self.many))
        ]
        return envelope(
            "host",
            machine={"device": self.device, "processor": self.processor, "torch": torch.__version__},
            config={"tokens": TOKENS, **SIZES},
            rows=rows,
            caveats=self.caveats,
            host_block_ms=round(self.block_ms, 3),
            spread=round(self.spread, 3),
        )

    def text(self) -> str:
        return "\n".join(
            [
                f"on            {self.processor} with {self.device}, torch {torch.__version__}",
                f"host          {self.block_ms:.2f} ms to launch the kernels of a Llama block, forward and backward; "
                f"the forecast assumes {1e3 * EAGER_BLOCK_HOST:.2f} ms by default, and more beside a Grace",
                f"plan with     hardware.host_block_ms={self.block_ms:.2f}",
                *self.caveats,
            ]
        )


def measure_host(report: Callable[[str], None]) -> HostReport:
    """Steps of two small Llamas on the first GPU, in turns, so that a change of the host's speed reaches both."""
    if not cuda_devices():
        raise UserMistake(
            "bench host measures how fast this host launches kernels of a GPU, and there is none: run it on a machine "
            "with one."
        )
    return measure_on(first_device(), report)


def measure_on(device: torch.device, report: Callable[[str], None]) -> HostReport:
    report(f"measuring {STEPS} steps of {FEW} and of {MANY} blocks …")
    return measure_models(build_models(device), device, warmup=WARMUP, steps=STEPS)


def build_models(device: torch.device) -> dict[int, torch.nn.Module]:
    """By their number of blocks."""
    return {blocks: _build(blocks, device) for blocks in (FEW, MANY)}


def measure_models(models: dict[int, torch.nn.Module], device: torch.device, *, warmup: int, steps: int) -> HostReport:
    tokens = torch.zeros((1, TOKENS), dtype=torch.long, device=device)
    found: dict[int, list[float]] = {FEW: [], MANY: []}
    for step in range(warmup + steps):
        for blocks, model in models.items():
            seconds = _step(model, tokens)
            if step >= warmup:
                found[blocks].append(seconds)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return HostReport(found[FEW], found[MANY], name, processor_name())


def _build(blocks: int, device: torch.device) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    config = transformers_config(shape_from_sizes(family="llama", layers=blocks, **SIZES))
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
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


def processor_name(described: Path = Path("/proc/cpuinfo")) -> str:
    """The host's processor, as the kernel names it."""
    lines = described.read_text().splitlines() if described.exists() else []
    named = next((line for line in lines if line.startswith("model name")), "")
    return named.partition(":")[2].strip() or platform.processor() or platform.machine()
