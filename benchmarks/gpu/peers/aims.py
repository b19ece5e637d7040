"""What cases of shoal have to reach on one H200: tokens per second, or memory."""

from collections.abc import Iterator
from typing import Any

# Tokens per second, and the peer's that it has to exceed in the same call.
SPEED: dict[str, tuple[float, tuple[str, ...]]] = {
    "gpt2-ours": (450_000, ("gpt2-plain",)),
    "gpt2-dropout-ours": (400_000, ("gpt2-dropout-plain",)),
    "pythia-160m-ours": (430_000, ("pythia-160m-plain",)),
    "smollm2-135m-ours": (400_000, ("smollm2-135m-plain", "smollm2-135m-plain-graphs")),
    "mistral-7b-ours": (10_500, ()),
}
MEMORY_GIB = {"fp32-ours": 40.0}
GPU = "NVIDIA H200"


def aim_lines(figures: dict[str, dict[str, Any]], gpu: str | None) -> Iterator[str]:
    """A line for every aim whose case was measured; `figures` by name of the case."""
    if gpu != GPU:
        return
    for name, (aim, peers) in SPEED.items():
        if name in figures:
            speed = figures[name]["tokens_per_second"]
            best = max((figures[peer]["tokens_per_second"] for peer in peers if peer in figures), default=0.0)
            beside = f", {speed / best:.2f} × the best peer" if best else ""
            yield f"- {name}: {speed:,.0f} tokens/s of {aim:,.0f}{beside}: {_met(speed >= max(aim, best))}"
    for name, limit in MEMORY_GIB.items():
        if name in figures:
            gib = figures[name]["allocated_gib"]
            yield f"- {name}: {gib:.1f} GiB, at most {limit:.0f}: {_met(gib <= limit)}"


def _met(met: bool) -> str:
    return "met" if met else "NOT MET"
