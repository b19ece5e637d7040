"""shoal's own cases, run by `shoal bench`, which uses the real training loop."""

import json
from pathlib import Path
from typing import Any

from peers.cases import Case
from peers.instructions import instruction_data
from peers.sequences import text_data
from peers.task import BETAS, CLIP, EPSILON, LEARNING_RATE, SEED, WEIGHT_DECAY


def config_of(case: Case, work: Path, weights: Path | None = None) -> dict[str, Any]:
    """The config of a case: only the job itself. Everything that affects speed is left at its default."""
    if weights is None:
        model: dict[str, Any] = {"shape": case.shape}
    else:
        model = {"from": str(weights)}
    return {
        "name": case.name,
        "seed": SEED,
        "model": {**model, "tokenizer": "bytes"},
        "data": data_of(case, work),
        "train": {
            "steps": 1000,  # more than are run: the benchmark stops earlier
            "global_batch": case.micro_batch * case.ranks,
            "micro_batch": case.micro_batch,
            "lr": LEARNING_RATE,
            "schedule": {"name": "constant", "warmup": 0},
            "optimizer": {"betas": list(BETAS), "eps": EPSILON, "weight_decay": WEIGHT_DECAY},
            "clip": CLIP,
        },
        "log": {"to": []},
    }


def data_of(case: Case, work: Path) -> dict[str, Any]:
    return instruction_data(work, case.length) if case.data == "instructions" else text_data(work, case.length)


def command_of(case: Case, folder: Path, work: Path, warmup: int, steps: int, weights: Path | None = None) -> list[str]:
    """Write the config, and return the arguments of `python`."""
    file = folder / "run.yaml"
    file.write_text(json.dumps(config_of(case, work, weights), indent=2))  # JSON is YAML
    overrides = [f"{key}={json.dumps(value)}" for key, value in case.config.items()]
    counts = ["--steps", str(steps), "--warmup", str(warmup)]
    world = ["--world", str(case.ranks), "--real"] if case.command == "rank" else []
    return ["-m", "shoal", "bench", case.command, str(file), *overrides, *world, *counts, "--json"]
