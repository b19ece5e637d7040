"""Difference of the losses from fp32: the same steps on the same sequences from the same weights.

The reference is a plain fp32 loop with transformers, not shoal's own fp32, so that it does not share a bug with shoal.
shoal's fp32 is one of the cases that are compared with it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.cases import FP8_HEAD, TINY_LENGTH, TINY_MICRO_BATCH, TINY_SHAPE, Case, matches

STEPS, TINY_STEPS = 50, 4
SHAPE = {
    "family": "llama",
    "hidden": 1024,
    "layers": 8,
    "heads": 16,
    "kv_heads": 8,
    "ffn": 2816,
    "vocab": 32_000,
    "positions": 1024,
    "tied": True,
}
LENGTH, MICRO_BATCH = 1024, 8
REFERENCE, PEER = "numerics-fp32", "numerics-hf-trainer"
# Bounds on the mean and the maximum difference. That of bf16-mixed is relative to HF Trainer's mean in the same run.
BOUNDS = {"numerics-ours-fp8": (0.02, 0.1), "numerics-ours-fp8-head": (0.02, 0.1), "numerics-ours-fp32": (1e-5, 1e-4)}
BF16_FACTOR = 1.25


def _case(name: str, label: str, runner: str, needs: tuple[str, ...] = (), **config: Any) -> Case:
    return Case(name, "numerics", label, runner, SHAPE, LENGTH, MICRO_BATCH, needs=needs, config=config)


CASES = [
    _case(REFERENCE, "plain loop, fp32", "plain"),
    _case(PEER, "HF Trainer, bf16", "hf_trainer", ("transformers", "accelerate")),
    _case("numerics-ours", "shoal, bf16-mixed", "ours"),
    _case("numerics-ours-fp8", "shoal, fp8", "ours", **{"train.precision": "fp8"}),
    _case("numerics-ours-fp8-head", "shoal, fp8, also in the head", "ours", **FP8_HEAD),
    _case("numerics-ours-fp32", "shoal, 32-true", "ours", **{"train.precision": "32-true"}),
]


def select(patterns: list[str], tiny: bool) -> list[Case]:
    chosen = [case for case in CASES if matches(case, patterns)]
    if not tiny:
        return chosen
    return [replace(case, shape=TINY_SHAPE, length=TINY_LENGTH, micro_batch=TINY_MICRO_BATCH) for case in chosen]


def write_weights(folder: Path, shape: dict[str, Any]) -> None:
    """Write the Hugging Face folder with the initial weights of all cases."""
    import torch
    from transformers import AutoModelForCausalLM

    from peers.task import SEED
    from shoal.catalogue.shapes import shape_from_sizes
    from shoal.models.families import transformers_config

    torch.manual_seed(SEED)
    model = AutoModelForCausalLM.from_config(transformers_config(shape_from_sizes(**shape)), dtype=torch.float32)
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Drift:
    """Absolute difference of the losses from the reference's, over all steps."""

    mean: float
    maximum: float
    last: float


@dataclass(frozen=True)
class Bound:
    """Bounds on a case's difference from fp32; `maximum` is None if only the mean is bounded."""

    mean: float
    maximum: float | None
    met: bool


def check_bounds(found: dict[str, Drift]) -> dict[str, Bound]:
    """By case, for those that have bounds and were measured."""
    bounds: dict[str, tuple[float, float | None]] = dict(BOUNDS)
    if PEER in found:
        bounds["numerics-ours"] = (BF16_FACTOR * found[PEER].mean, None)
    checked = {}
    for name, (mean, maximum) in bounds.items():
        if (drift := found.get(name)) is not None:
            within = drift.mean <= mean and (maximum is None or drift.maximum <= maximum)
            checked[name] = Bound(mean, maximum, within)
    return checked


def drifts(losses: dict[str, list[float | None]]) -> dict[str, Drift]:
    """By case, for those that have as many losses as the reference."""
    reference = losses.get(REFERENCE)
    found = {}
    for name, own in losses.items():
        if reference and name != REFERENCE and len(own) == len(reference):
            pairs = zip(own, reference, strict=True)
            differences = [abs(one - other) for one, other in pairs if one is not None and other is not None]
            # Leaving out steps with a non-finite loss would understate the difference.
            if len(differences) == len(reference):
                found[name] = Drift(sum(differences) / len(differences), max(differences), differences[-1])
    return found
