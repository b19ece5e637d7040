"""How far from fp32 each way of training drifts: the same steps on the same rows from the same weights.

The reference is the plainest loop in fp32 with transformers, and not shoal's own fp32, so that a mistake of shoal's
cannot hide in it; shoal's fp32 is one of those that are held to it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers.cases import TINY_LENGTH, TINY_ROWS, TINY_SHAPE, Case, fits

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
LENGTH, ROWS = 1024, 8
REFERENCE, PEER = "numerics-fp32", "numerics-hf-trainer"
# What is promised of the mean and the largest distance. bf16-mixed is held to HF Trainer's mean in the same run.
BANDS = {"numerics-ours-fp8": (0.02, 0.1), "numerics-ours-fp32": (1e-5, 1e-4)}
AS_NEAR = 1.25


def _case(name: str, label: str, runner: str, needs: tuple[str, ...] = (), **config: Any) -> Case:
    return Case(name, "numerics", label, runner, SHAPE, LENGTH, ROWS, needs=needs, config=config)


CASES = [
    _case(REFERENCE, "plain loop, fp32", "plain"),
    _case(PEER, "HF Trainer, bf16", "hf_trainer", ("transformers", "accelerate")),
    _case("numerics-ours", "shoal, bf16-mixed", "ours"),
    _case("numerics-ours-fp8", "shoal, fp8", "ours", **{"train.precision": "fp8"}),
    _case("numerics-ours-fp32", "shoal, 32-true", "ours", **{"train.precision": "32-true"}),
]


def select(patterns: list[str], tiny: bool) -> list[Case]:
    chosen = [case for case in CASES if fits(case, patterns)]
    if not tiny:
        return chosen
    return [replace(case, shape=TINY_SHAPE, length=TINY_LENGTH, rows=TINY_ROWS) for case in chosen]


def write_weights(folder: Path, shape: dict[str, Any]) -> None:
    """A Hugging Face folder that all of them start from."""
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
    """Distances of the losses from the reference's, step by step."""

    mean: float
    largest: float
    last: float


@dataclass(frozen=True)
class Promise:
    """Of a case's distances; `largest` is None where only the mean is promised."""

    mean: float
    largest: float | None
    kept: bool


def promises(found: dict[str, Drift]) -> dict[str, Promise]:
    """By case, where something is promised and was measured."""
    bands: dict[str, tuple[float, float | None]] = dict(BANDS)
    if PEER in found:
        bands["numerics-ours"] = (AS_NEAR * found[PEER].mean, None)
    kept = {}
    for name, (mean, largest) in bands.items():
        if (drift := found.get(name)) is not None:
            within = drift.mean <= mean and (largest is None or drift.largest <= largest)
            kept[name] = Promise(mean, largest, within)
    return kept


def drifts(losses: dict[str, list[float | None]]) -> dict[str, Drift]:
    """By case, for all that have a loss for every step that the reference has one for."""
    reference = losses.get(REFERENCE)
    found = {}
    for name, own in losses.items():
        if reference and name != REFERENCE and len(own) == len(reference):
            pairs = zip(own, reference, strict=True)
            apart = [abs(one - other) for one, other in pairs if one is not None and other is not None]
            # Without a step that has no number the distance would look smaller than it is.
            if len(apart) == len(reference):
                found[name] = Drift(sum(apart) / len(apart), max(apart), apart[-1])
    return found
