"""Resolve every `auto` of a run that is about to start, for its model and for the devices of all ranks."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.catalogue.families import PLANS
from shoal.config.schema import Config
from shoal.models.anatomy import require_blocks
from shoal.models.prepare import PreparedModel
from shoal.parallel.check import SHARD_INSTEAD
from shoal.parallel.device import Device
from shoal.parallel.ranks import Ranks
from shoal.parallel.stages import check_pipeline
from shoal.plan.advise import changed
from shoal.plan.decide import choose
from shoal.plan.from_model import Counted, shape_of_model
from shoal.plan.machine import Machine, host_memory_gib, machine_at_hand
from shoal.plan.report import memory_of, speed_of
from shoal.plan.resolved import ResolvedRun
from shoal.plan.systems.modelled import ENGINES, SYSTEMS

SHRUNK = "as before, with a smaller micro-batch after running out of memory"


def resolve_run(
    config: Config, prepared: PreparedModel, machine: Machine, *, overrides: Mapping[str, Any] | None = None
) -> ResolvedRun:
    """What `shoal plan` would choose for this model on this machine. `overrides` replace keys of the config, after the
    previous choice ran out of memory."""
    model, anatomy, parallel = prepared.model, prepared.anatomy, config.parallel
    # A stage without a block cannot be forecast. The number of micro-batches is not known yet.
    if parallel.pp > 1:
        require_blocks(anatomy, model, "parallel.pp", SHARD_INSTEAD)
        check_pipeline(model, anatomy, parallel.pp, parallel.pp_schedule, grad_accum_steps=parallel.pp)
    shape, exact = shape_of_model(model.config.to_dict(), _count(prepared))
    wanted = dict(overrides or {})
    if config.train.recompute == "auto" and not anatomy.blocks:  # there is nothing to recompute without blocks
        wanted.setdefault("train.recompute", "none")
    # A model that is only approximated by a known shape has no tensor-parallel or pipeline plan.
    allow_model_parallel = exact and model.config.model_type in PLANS
    choice = choose(
        changed(config, wanted),
        shape,
        machine,
        checked=False,
        allow_model_parallel=allow_model_parallel,
        traits=SYSTEMS[ENGINES[parallel.engine]],
    )
    return replace(choice, requested=config, exact=exact, reason=SHRUNK if overrides else choice.reason)


def resolve_for_all(
    resolved: ResolvedRun,
    config: Config,
    prepared: PreparedModel,
    device: Device,
    ranks: Ranks,
    overrides: Mapping[str, Any],
) -> ResolvedRun:
    """The same run on every rank. Resolved anew only where the ranks' devices differ."""
    machine = machine_of_all(config, device, ranks)
    if config == resolved.requested and machine == resolved.machine:
        return resolved
    return resolve_run(config, prepared, machine, overrides=overrides)


def forecast_values(resolved: ResolvedRun) -> dict[str, Any]:
    """The `forecast` entry of `plan.json`."""
    memory, speed = memory_of(resolved), speed_of(resolved)
    return {
        "memory": {key: memory[key] for key in ("allocated_gib", "reserved_gib", "terms")},
        "speed": {key: speed[key] for key in ("tokens_per_second_per_gpu", "step_seconds", "mfu")},
        "exact": resolved.exact,
    }


def _count(prepared: PreparedModel) -> Counted:
    model, anatomy = prepared.model, prepared.anatomy
    table = model.get_input_embeddings().weight
    return Counted(
        parameters=prepared.parameters,
        layers=len(anatomy.blocks) or int(getattr(model.config.get_text_config(), "num_hidden_layers", 1)),
        hidden=int(table.shape[-1]),
        vocabulary=int(table.shape[0]),
        tied=anatomy.tied,
    )


def machine_here(config: Config, device: Device, world_size: int) -> Machine:
    """The hardware that this process sees, without asking other ranks."""
    return _machine(config, world_size, _nodes(config, world_size), device.name, device.memory_gib, host_memory_gib())


def machine_of_all(config: Config, device: Device, ranks: Ranks) -> Machine:
    """The same on every rank, so that all choose the same batch: rank 0's kind of device, and the smallest memory of
    any rank."""
    seen = json.loads(ranks.broadcast(json.dumps([device.name, _nodes(config, ranks.world_size)])))
    memory = device.memory_gib if device.memory_gib is None else ranks.smallest(device.memory_gib)
    host = ranks.smallest(host_memory_gib() or 0.0) or None
    return _machine(config, ranks.world_size, seen[1], seen[0], memory, host)


def _machine(
    config: Config, world_size: int, nodes: int, name: str | None, memory_gib: float | None, host_gib: float | None
) -> Machine:
    return machine_at_hand(
        name,
        memory_gib,
        world_size // nodes,
        nodes,
        hardware=config.hardware,
        host_gib=config.hardware.host_gib or host_gib,
    )


def _nodes(config: Config, world_size: int) -> int:
    """Number of nodes: from the launcher's environment, else from the config."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    nodes = max(1, world_size // local) if local else config.hardware.nodes
    return nodes if world_size % nodes == 0 else 1  # uneven nodes are counted as one
