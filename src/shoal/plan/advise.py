"""Alternatives to a plan: other strategies on the same devices, and changes that save memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.shapes import ModelShape
from shoal.catalogue.strategies import COMPARED, find_strategy
from shoal.config.engine import uses_deepspeed
from shoal.config.mesh import CONFIGURED_AXES
from shoal.config.schema import Config
from shoal.config.unbuilt import find_unbuilt
from shoal.mistakes import UserMistake
from shoal.plan.check import is_trainable
from shoal.plan.decide import choose
from shoal.plan.machine import Machine
from shoal.plan.resolved import ResolvedRun
from shoal.plan.systems.modelled import OURS
from shoal.plan.systems.traits import SystemTraits
from shoal.plan.terms import GIB

# From this sequence length on, context parallelism is offered.
LONG = 32_768
# At most this many changes are combined when no single one is enough.
MAX_COMBINED = 6
# What a change affects, the least intrusive first.
AFFECTS = ("execution", "numerics", "what is trained", "hardware")


@dataclass(frozen=True)
class Change:
    """Config keys to set, and the effect."""

    settings: tuple[str, ...]  # key=value
    affects: str  # one of AFFECTS
    choice: ResolvedRun
    saves_gib: float
    slower: float  # relative change of the time per token; negative is faster

    @property
    def built(self) -> bool:
        """Whether `shoal train` accepts it: the forecast covers more than is implemented."""
        return not any(find_unbuilt(self.choice.config))

    def as_dict(self) -> dict[str, Any]:
        return {
            "set": list(self.settings),
            "built": self.built,
            "affects": self.affects,
            "fits": self.choice.fits,
            "reserved_gib": round(self.choice.memory.reserved / GIB, 2),
            "saves_gib": round(self.saves_gib, 2),
            "slower": round(self.slower, 3),
        }


@dataclass(frozen=True)
class Question:
    """A config, its model and the hardware it is planned for."""

    config: Config
    shape: ModelShape
    machine: Machine
    traits: SystemTraits = field(default=OURS)

    def answer(self, changes: dict[str, Any] | None = None) -> ResolvedRun | None:
        """The choice with some keys changed; None if the result is invalid, or training would refuse it."""
        try:
            config = changed(self.config, changes or {})
            if changes and self.traits == OURS and not self._is_trainable(config):
                return None
            machine = self.machine
            if changes and "hardware.nodes" in changes:
                machine = machine.of(machine.devices, changes["hardware.nodes"])
            if changes and "hardware.devices" in changes:
                machine = machine.of(changes["hardware.devices"], machine.nodes)
            return choose(config, self.shape, machine, traits=self.traits)
        except UserMistake:
            return None

    def _is_trainable(self, config: Config) -> bool:
        """Whether training accepts a changed config, if it accepts the one that was given."""
        return is_trainable(self.shape, config) or not is_trainable(self.shape, self.config)


def changed(config: Config, changes: dict[str, Any]) -> Config:
    """The config with dotted keys replaced; values are not validated."""
    for dotted, value in changes.items():
        block, key = dotted.rsplit(".", 1)
        if "." in block:
            outer, inner = block.split(".")
            parent = getattr(config, outer)
            nested = getattr(parent, inner).model_copy(update={key: value})
            config = config.model_copy(update={outer: parent.model_copy(update={inner: nested})})
        else:
            config = config.model_copy(update={block: getattr(config, block).model_copy(update={key: value})})
    return config


def alternatives(choice: ResolvedRun, question: Question) -> list[ResolvedRun]:
    """`choice` and one run for each other strategy that the devices allow, the fastest that fits first."""
    found = {choice.name: choice}
    for changes in _strategies(question):
        other = question.answer({"train.micro_batch": "auto", **changes})
        if other is not None:
            found.setdefault(other.name, other)
    return sorted(found.values(), key=lambda choice: (not choice.fits, -choice.speed.tokens_per_second_per_gpu))


def _strategies(question: Question) -> Iterator[dict[str, Any]]:
    config, machine, shape = question.config, question.machine, question.shape
    world = machine.world_size
    plain = {**{f"parallel.{axis}": 1 for axis in CONFIGURED_AXES}, "parallel.sharding": "full_shard"}
    if world == 1:
        yield {**plain, "parallel.strategy": "single"}
        return
    for strategy in COMPARED:
        yield {**plain, "parallel.strategy": strategy}
    if uses_deepspeed(config):
        return
    if machine.nodes > 1:
        yield {**plain, "parallel.strategy": "fsdp", "parallel.sharding": "hybrid_shard"}
    degrees = [tp for tp in (2, 4, 8) if tp <= machine.devices and not shape.heads % tp and not shape.kv_heads % tp]
    for tp in degrees[-1:] if len(degrees) < 2 else (degrees[0], degrees[-1]):
        yield {**plain, "parallel.strategy": "fsdp", "parallel.tp": tp}
    stages = [stages for stages in (2, 4, 8, machine.nodes) if 1 < stages <= min(world, shape.layers)]
    for pipeline in sorted({stages[0], machine.nodes} & set(stages)) if stages else ():
        yield {**plain, "parallel.strategy": "fsdp", "parallel.pp": pipeline}
        if degrees and machine.nodes > 1 and degrees[-1] * pipeline <= world:
            yield {**plain, "parallel.strategy": "fsdp", "parallel.tp": degrees[-1], "parallel.pp": pipeline}
    if config.data.max_length >= LONG:
        ranks = min(8, machine.devices)
        method = "gather" if shape.heads % ranks else "ulysses"
        yield {**plain, "parallel.strategy": "fsdp", "parallel.cp": ranks, "parallel.cp_method": method}


def changes(choice: ResolvedRun, question: Question) -> list[Change]:
    """Changes that make a run fit, cheapest first: single ones if that is enough, else several combined."""
    return [change for change in savings(choice, question) if change.choice.fits] or _combined(choice, question)


def savings(choice: ResolvedRun, question: Question) -> list[Change]:
    """Every single change that saves memory, whether or not the run is forecast to fit: for runs that ran out."""
    found = [change for one in _candidates(choice) if (change := _try(choice, question, one)) is not None]
    return sorted(found, key=lambda change: (AFFECTS.index(change.affects), change.slower))


def _combined(choice: ResolvedRun, question: Question) -> list[Change]:
    """Add changes until the run fits, each time the one that costs least time per GiB saved."""
    taken: dict[str, Any] = {}
    found: list[Change] = []
    current = choice
    while len(found) < MAX_COMBINED and not current.fits:
        tried = []
        for one in _candidates(choice):
            if not any(key in taken for key in one):
                change = _try(choice, question, {**taken, **one})
                if change is not None and change.choice.memory.reserved < current.memory.reserved * 0.99:
                    tried.append((change, one))
        if not tried:
            break
        # The least intrusive change that is enough; else the one that saves most per cost among the least intrusive.
        enough = [pair for pair in tried if pair[0].choice.fits]
        mildest = min(_rank(one) for _, one in enough or tried)
        pool = [pair for pair in enough or tried if _rank(pair[1]) == mildest]
        change, one = min(pool, key=lambda pair: pair[0].slower if enough else _cost(pair[0], current))
        taken |= one
        found.append(change)
        current = change.choice
    return found


def _rank(one: dict[str, Any]) -> int:
    """Index in AFFECTS of the most intrusive of these changes."""
    return max(AFFECTS.index(_affected(key, value)) for key, value in one.items())


def _affected(key: str, value: Any) -> str:
    if key.startswith("hardware."):
        return "hardware"
    if key.startswith("adapter.") or key == "data.max_length":
        return "what is trained"
    if key == "train.optimizer.name" or (key == "train.precision" and value == "bf16-true"):
        return "numerics"
    return "execution"


def _cost(change: Change, current: ResolvedRun) -> float:
    """Time per GiB saved, never negative: free changes are ordered by what they save."""
    saved = (current.memory.reserved - change.choice.memory.reserved) / GIB
    return (max(0.0, change.slower) + 0.01) / max(saved, 1e-9)


def _try(choice: ResolvedRun, question: Question, one: dict[str, Any]) -> Change | None:
    answer = question.answer(one)
    if answer is None or answer.memory.reserved >= choice.memory.reserved * 0.995:
        return None
    before, after = (each.speed.tokens_per_second_per_gpu for each in (choice, answer))
    saved = (choice.memory.reserved - answer.memory.reserved) / GIB
    settings = tuple(f"{key}={_shown(value)}" for key, value in one.items())
    return Change(settings, AFFECTS[_rank(one)], answer, saved, before / after - 1)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _candidates(choice: ResolvedRun) -> Sequence[dict[str, Any]]:
    """Single changes worth trying, whatever their cost."""
    run, config, machine = choice.run, choice.config, choice.machine
    found: list[dict[str, Any]] = []
    if run.loss == "plain" and not run.shape.traits.head_transform:
        found.append({"train.loss_impl": "chunked"})
    if run.micro_batch > 1:
        half = run.micro_batch
        while half > 1 and half % 2 == 0:
            half //= 2
            found.append({"train.micro_batch": half})
        found.append({"train.micro_batch": 1})
    if run.recompute == "none" and run.compiled:
        found.append({"train.recompute": "cheap"})
    if run.recompute in ("none", "cheap") and config.parallel.wrap == "auto":  # `recomputations` says why
        found.append({"train.recompute": "selective"})
    if run.recompute not in ("full", "offload"):
        found.append({"train.recompute": "full"})
    if run.recompute != "offload" and not run.gpu.is_cpu:
        found.append({"train.recompute": "offload"})
    if machine.world_size > 1 and not run.sharded and machine.world_size > run.mesh.tp * run.mesh.pp:
        found += [{"parallel.strategy": name} for name in COMPARED if find_strategy(name).shards_optimizer]
    elif run.keeps_weights and run.sharded and run.mesh.pp == 1:
        found.append({"parallel.strategy": "zero3", "parallel.sharding": "full_shard"})
    if run.sharded and run.mesh.dp_replicate > 1:
        found.append({"parallel.strategy": "fsdp", "parallel.sharding": "full_shard"})
    for tp in (2, 4, 8):
        if run.mesh.tp < tp <= machine.devices and machine.world_size % (tp * run.mesh.pp * run.mesh.cp) == 0:
            found.append({"parallel.tp": tp})
    if run.offload == "none":
        found.append({"parallel.offload": "optimizer"})
        if run.mesh.pp == 1 and not run.data_parallelism.partitions_update:
            found.append({"parallel.strategy": "fsdp", "parallel.offload": "cpu"})
    if (smaller := find_optimizer(run.optimizer).smaller) is not None and run.adapter is None:
        found.append({"train.optimizer.name": smaller})
    if run.mixed and run.gpu.bf16:
        found.append({"train.precision": "bf16-true"})
    if run.adapter is None:
        found += [{"adapter.kind": "lora"}, {"adapter.kind": "qlora"}]
    elif run.adapter.quantize is None:
        found.append({"adapter.kind": "qlora"})
    if config.data.max_length >= 1024:
        found.append({"data.max_length": config.data.max_length // 2})
    for factor in (2, 4, 8):
        found.append(_more(machine, factor))
    return found


def _more(machine: Machine, factor: int) -> dict[str, Any]:
    """More devices: up to eight in one node, beyond that more nodes."""
    if machine.nodes == 1 and machine.devices * factor <= 8:
        return {"hardware.devices": machine.devices * factor}
    return {"hardware.nodes": machine.nodes * factor}
