"""The plan's choice for a run that is about to start: what `auto` means here, and what to expect of it."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.models.anatomy import Anatomy, read_anatomy, require_blocks
from shoal.parallel.check import SHARD_INSTEAD
from shoal.parallel.device import Device
from shoal.parallel.plans import PLANS
from shoal.parallel.ranks import Ranks
from shoal.parallel.stages import check_pipeline
from shoal.plan.advise import changed
from shoal.plan.choose import Chosen
from shoal.plan.decide import Choice, choose
from shoal.plan.from_model import Counted, shape_of_model
from shoal.plan.machine import Machine, host_memory_gib, machine_at_hand
from shoal.plan.report import memory_of, speed_of

SHRUNK = "as before, with fewer rows a pass, since memory ran out"


@dataclass(frozen=True)
class Forecast:
    """How a run is carried out, and what it is expected to take."""

    choice: Choice
    exact: bool  # false: of a model that only resembles this one

    @property
    def config(self) -> Config:
        """The run's config without an auto in what the plan chooses. What the run keeps is the user's."""
        return self.choice.config

    @property
    def mesh(self) -> Mesh:
        return self.choice.run.mesh

    @property
    def chosen(self) -> Chosen:
        return self.choice.chosen()

    @property
    def is_promise(self) -> bool:
        """Whether measured numbers are to be held against it."""
        return self.exact and not self.choice.machine.is_cpu

    def as_dict(self) -> dict[str, Any]:
        """As `plan.json` holds it."""
        memory, speed = memory_of(self.choice), speed_of(self.choice)
        return {
            "memory": {key: memory[key] for key in ("allocated_gib", "reserved_gib", "terms")},
            "speed": {key: speed[key] for key in ("tokens_per_second_per_gpu", "step_seconds", "mfu")},
            "exact": self.exact,
        }


def make_forecast(
    config: Config, model: Any, machine: Machine, *, instead: Mapping[str, Any] | None = None
) -> Forecast:
    """What `shoal plan` would choose for this model on this machine; `instead` are keys that are settled otherwise than
    in the config, because memory ran out with what was chosen before."""
    anatomy, parallel = read_anatomy(model), config.parallel
    # Stages without a block cannot even be forecast. How many passes go through them is not known yet.
    if parallel.pp > 1:
        require_blocks(anatomy, model, "parallel.pp", SHARD_INSTEAD)
        check_pipeline(model, anatomy, parallel.pp, parallel.pp_schedule, grad_accum_steps=parallel.pp)
    shape, exact = shape_of_model(model.config.to_dict(), _count(model, anatomy))
    wanted = dict(instead or {})
    if config.train.recompute == "auto" and not anatomy.blocks:  # of a model without blocks nothing is recomputed
        wanted.setdefault("train.recompute", "none")
    # A model that is only counted as a Llama is not one that can be cut like it.
    may_cut = exact and model.config.model_type in PLANS
    choice = choose(changed(config, wanted), shape, machine, checked=False, may_cut=may_cut)
    return Forecast(replace(choice, reason=SHRUNK) if instead else choice, exact)


def _count(model: Any, anatomy: Anatomy) -> Counted:
    table = model.get_input_embeddings().weight
    return Counted(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=len(anatomy.blocks) or int(getattr(model.config.get_text_config(), "num_hidden_layers", 1)),
        hidden=int(table.shape[-1]),
        vocabulary=int(table.shape[0]),
        tied=anatomy.tied,
    )


def machine_here(config: Config, device: Device, world_size: int) -> Machine:
    """What this process would run on, as far as it sees by itself."""
    return _machine(config, world_size, _nodes(config, world_size), device.name, device.memory_gib, host_memory_gib())


def machine_of_all(config: Config, device: Device, ranks: Ranks) -> Machine:
    """The same for every rank, since unlike ones would choose unlike batches: the first's kind of device, and the least
    memory of any."""
    seen = json.loads(ranks.told(json.dumps([device.name, _nodes(config, ranks.world_size)])))
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
    """Machines of the run: as the launcher says, or else the config."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    nodes = max(1, world_size // local) if local else config.hardware.nodes
    return nodes if world_size % nodes == 0 else 1  # machines that are not alike are counted as one
