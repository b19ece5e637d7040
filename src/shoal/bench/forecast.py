"""The forecast for one rank of a job, in the terms in which it is held against what was measured."""

from collections.abc import Mapping
from typing import Any

from shoal.config.schema import Config
from shoal.plan.decide import Choice, choose
from shoal.plan.machine import Machine, read_machine
from shoal.plan.models import read_shape
from shoal.plan.terms import GIB

DEVICES_PER_NODE = 8
# Terms of the forecast's tree, and of a trace, by the terms that are compared. Those that come and go within a block
# are one: which of them is largest when most is held, the forecast does not say.
COMPARED = {
    "weights": ("weights",),
    "gradients": ("gradients",),
    "optimizer state": ("optimizer state",),
    "activations": ("activations",),
    "head and loss": ("head",),
    "gathered weights": ("gathered weights",),
    "in passing": (
        "gradients being reduced",
        "backward of a block",
        "communication buffers",
        "embedding's gradient",
        "embedding's gradient, as computed",
        "optimizer's work",
        "other",
    ),
}


def machine_of(config: Config, world_size: int) -> Machine:
    """The machines that `config.hardware` describes, so many that there are `world_size` devices."""
    machine, wanted = read_machine(config.hardware), config.hardware.devices
    devices = min(world_size, DEVICES_PER_NODE if wanted == "auto" else wanted)
    nodes = world_size // devices
    # What does not fill machines is counted as one.
    return machine.of(devices, nodes) if devices * nodes == world_size else machine.of(world_size, 1)


def uncompiled_choice(config: Config, world_size: int) -> Choice:
    """How a job of `world_size` ranks would be carried out, with blocks that are not compiled."""
    eager = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    return choose(eager, read_shape(config.model), machine_of(config, world_size))


def compared_terms(sizes: Mapping[str, float]) -> dict[str, float]:
    """GiB by the terms that are compared."""
    known = {name for names in COMPARED.values() for name in names}
    assert sizes.keys() <= known, f"no term to compare {sizes.keys() - known} with"
    return {term: sum(sizes.get(name, 0.0) for name in names) / GIB for term, names in COMPARED.items()}


def forecast_memory(choice: Choice, moment: str | None = None) -> dict[str, Any]:
    """The memory that is forecast, with the terms of that moment of a step; of the fullest, where none is given."""
    place = choice.memory.places[0]
    wanted = next((one for one in place.moments if one.name == moment), place.peak)
    return {
        "allocated_gib": place.allocated / GIB,
        "fullest": place.peak.name,
        "terms_at": wanted.name,
        "terms": compared_terms({part.name: part.amount for part in wanted.tree.parts}),
        "moments": {one.name: one.tree.amount / GIB for one in place.moments},
    }


def forecast_compute(choice: Choice) -> dict[str, float]:
    """What a device needs by itself: exchanges with others take no time where there are no others."""
    speed = choice.speed
    parts = {part.name: part.amount for part in speed.step.parts}
    seconds = sum(amount for name, amount in parts.items() if not name.startswith(("communication", "pipeline")))
    return {"step_seconds": seconds, "tokens_per_second": speed.tokens_per_step / speed.world_size / seconds}
