"""The forecast for one rank of a job, in the terms that are compared with the measurement."""

from collections.abc import Mapping
from typing import Any

from shoal.config.schema import Config
from shoal.plan.decide import choose
from shoal.plan.machine import Machine, read_machine
from shoal.plan.models import read_shape
from shoal.plan.resolved import ResolvedRun
from shoal.plan.terms import GIB

DEVICES_PER_NODE = 8
# What a trace, which launches nothing, does not have.
WORKSPACES = "matmul workspaces"
# Compared term -> terms of the forecast and of a trace. Transient terms are summed: which of them is largest at the
# peak depends on details that the forecast does not model.
COMPARED = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer state",),
    "activations": ("activations",),
    "head and loss": ("head",),
    "gathered weights": ("gathered weights",),
    "transient": (
        "gradients being reduced",
        "block backward",
        "communication buffers",
        "embedding gradient",
        "embedding gradient before accumulation",
        "optimizer temporaries",
        WORKSPACES,
        "other",
    ),
}


def machine_of(config: Config, world_size: int) -> Machine:
    """The hardware of `config`, with as many nodes as `world_size` devices need."""
    machine, wanted = read_machine(config.hardware), config.hardware.devices
    devices = min(world_size, DEVICES_PER_NODE if wanted == "auto" else wanted)
    nodes = world_size // devices
    # A world size that does not fill nodes is treated as one node.
    return machine.of(devices, nodes) if devices * nodes == world_size else machine.of(world_size, 1)


def uncompiled_choice(config: Config, world_size: int) -> ResolvedRun:
    """The choice for a job of `world_size` ranks, with uncompiled blocks."""
    eager = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    return choose(eager, read_shape(config.model), machine_of(config, world_size))


def compared_terms(sizes: Mapping[str, float]) -> dict[str, float]:
    """GiB by compared term."""
    known = {name for names in COMPARED.values() for name in names}
    assert sizes.keys() <= known, f"unknown terms {sizes.keys() - known}"
    return {term: sum(sizes.get(name, 0.0) for name in names) / GIB for term, names in COMPARED.items()}


def forecast_memory(choice: ResolvedRun, moment: str | None = None, *, traced: bool = False) -> dict[str, Any]:
    """The memory forecast with the terms at `moment`; at the peak if None. `traced`: as a trace would find it."""
    pipeline_rank = choice.memory.pipeline_ranks[0]
    wanted = next((one for one in pipeline_rank.moments if one.name == moment), pipeline_rank.peak)
    workspaces = wanted.tree.find(WORKSPACES) if traced else None
    less = 0.0 if workspaces is None else workspaces.amount
    parts = {part.name: part.amount for part in wanted.tree.parts if not (traced and part.name == WORKSPACES)}
    return {
        "allocated_gib": (pipeline_rank.allocated - less) / GIB,
        "peak_at": pipeline_rank.peak.name,
        "terms_at": wanted.name,
        "terms": compared_terms(parts),
        "moments": {one.name: (one.tree.amount - less) / GIB for one in pipeline_rank.moments},
    }


def forecast_compute(choice: ResolvedRun) -> dict[str, float]:
    """The compute time of a device, without communication."""
    speed = choice.speed
    parts = {part.name: part.amount for part in speed.step.parts}
    seconds = sum(amount for name, amount in parts.items() if not name.startswith(("communication", "pipeline")))
    return {"step_seconds": seconds, "tokens_per_second": speed.tokens_per_step / speed.world_size / seconds}
