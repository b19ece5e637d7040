"""What the run of a custom loop writes and says before its first step."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from shoal.config.run import BLOCKS_OF_SCRIPT, MADE_BY_SCRIPT
from shoal.config.schema import Config
from shoal.parallel.device import Device, describe_machine
from shoal.parallel.ranks import Ranks
from shoal.plan.resolved import describe_accumulation
from shoal.train.custom_job import CustomJob
from shoal.train.custom_run import CustomRun
from shoal.train.describe import write_plan


def custom_plan(shapes: Mapping[str, tuple[int, ...]], resolved: CustomRun, steps: int, ranks: Ranks) -> dict[str, Any]:
    """What plan.json says of it."""
    return {
        "custom_loop": True,
        "parameters": sum(torch.Size(shape).numel() for shape in shapes.values()),
        "steps": steps,
        "chosen": {
            "strategy": resolved.strategy,
            "world_size": resolved.world_size,
            "data_parallel": resolved.data_parallel,
            "micro_batch": resolved.micro_batch,
            "grad_accum_steps": resolved.grad_accum_steps,
            "global_batch": resolved.global_batch,
            "mesh": asdict(resolved.mesh),
            "sharding": resolved.config.parallel.sharding,
            "checkpoint_every": resolved.config.checkpoint.every,
        },
        "forecast": None,
        "measured": None,
        "off": None,
        "machine": describe_machine(ranks.device),
    }


def write_and_announce(job: CustomJob, parameters: int, device: Device) -> None:
    """Write what was planned, and say what is trained, and which options have no effect."""
    try:
        write_plan(job.run, job.plan)
    except OSError as error:
        raise job.run.unwritable(error) from None
    _announce(job, device, parameters)
    for note in (*job.model.notes, *_without_effect(job.resolved.requested)):
        job.reporter.warn(note)


def _announce(job: CustomJob, device: Device, parameters: int) -> None:
    resolved, config = job.resolved, job.config
    job.reporter.say(
        f"{parameters:,} parameters, {resolved.strategy} on {resolved.world_size} × "
        f"{device.gpu.name if device.gpu else job.ranks.device.type}; {job.steps} steps of {resolved.global_batch} "
        f"samples, micro-batch {resolved.micro_batch}, {describe_accumulation(resolved.grad_accum_steps)}."
    )
    if config.train.clip is not None:
        job.reporter.say(f"Gradients are clipped to a norm of {config.train.clip:g}; train.clip null does not.")
    if config.train.lr_scaling == "linear":
        job.reporter.say(
            f"The optimizer's learning rate is multiplied by global batch {resolved.global_batch} / base_batch "
            f"{config.train.base_batch} = {job.optimizer.first.optimizer.lr_scale:g}."
        )


def _without_effect(config: Config) -> list[str]:
    """Options for what the script makes itself."""
    default = Config.model_construct()
    blocks = [name for name in BLOCKS_OF_SCRIPT if getattr(config, name) != getattr(default, name)]
    keys = [f"train.{key}" for key in MADE_BY_SCRIPT if getattr(config.train, key) != getattr(default.train, key)]
    return [f"{key} has no effect in a custom loop: the script makes it." for key in (*blocks, *keys)]
