"""Write what other commands read of a run: its plan, model config and tokenizer."""

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import transformers

from shoal import __version__
from shoal.config.run import RunDirectory
from shoal.files import write_atomically
from shoal.models.base import Base
from shoal.parallel.ranks import Ranks
from shoal.plan.resolved import ResolvedRun
from shoal.train.inputs import Inputs
from shoal.train.resolve import forecast_values


def plan_values(
    inputs: Inputs, resolved: ResolvedRun, *, parameters: int, machine: Mapping[str, str | int]
) -> dict[str, Any]:
    """The contents of `plan.json` before the first step."""
    return {
        "parameters": parameters,
        "steps": inputs.steps,
        "chosen": resolved.as_dict(),
        "forecast": forecast_values(resolved),
        "measured": None,
        "off": None,
        "data": asdict(inputs.sets.training.summary),
        "machine": dict(machine),
        "versions": {
            "shoal": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }


def write_plan(run: RunDirectory, plan: Mapping[str, Any]) -> None:
    write_atomically(run.plan, json.dumps(plan, indent=2) + "\n")


def record_interval(
    run: RunDirectory, plan: dict[str, Any], every: int, ranks: Ranks, warn: Callable[[str], None]
) -> None:
    """The steps between checkpoints that `checkpoint.every: auto` means by now."""
    plan["chosen"]["checkpoint_every"] = every
    if not ranks.first or not run.plan.exists():
        return
    try:
        write_plan(run, plan)
    except OSError as error:  # a full disk must not end a run that does not depend on this file
        warn(f"{run.plan} cannot be written: {error.strerror}. Training continues.")


def describe(
    run: RunDirectory, *, inputs: Inputs, plan: Mapping[str, Any], architecture: str, base: Base | None
) -> None:
    """Write plan, model config and tokenizer into the run's folder, and the `base` of an adapter."""
    write_plan(run, plan)
    if base is not None:
        base.write(run.base)
    settings = inputs.blueprint.settings
    settings.architectures = [architecture]
    settings.save_pretrained(run.model)
    inputs.tokenizer.save(run.model)
