"""The result of `shoal plan`: one object, of which JSON, text and plot are views."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from shoal.catalogue.objectives import objective_facts
from shoal.catalogue.shapes import parameters
from shoal.config.combinations import find_untrained
from shoal.config.effect import without_effect
from shoal.config.reference import computes_before, switches_adapter_off
from shoal.config.resolve import with_global_batch
from shoal.config.schema import Config
from shoal.config.unbuilt import find_unbuilt
from shoal.plan.accuracy import expected_error
from shoal.plan.advise import Change, Question, alternatives, changed, changes
from shoal.plan.check import find_refused
from shoal.plan.decide import choose
from shoal.plan.from_config import plan_attention
from shoal.plan.goodput import Goodput
from shoal.plan.limits import Limits, limits
from shoal.plan.machine import Machine, read_machine
from shoal.plan.memory.states import trained_parameters
from shoal.plan.models import left_out_modules, read_shape, unknown_architecture
from shoal.plan.resolved import ResolvedRun, shown_recompute
from shoal.plan.run.layout import ranks
from shoal.plan.speed.forecast import replays_graphs
from shoal.plan.systems.like import Like, read_like, shown_value
from shoal.plan.systems.modelled import ENGINES
from shoal.plan.terms import GIB
from shoal.plan.unintended import unintended

HOUR = 3600
# The share of a step from which on a plan says that the device waits for its host.
WAITS_FOR_HOST = 0.15


@dataclass(frozen=True)
class Plan:
    """The forecast of a run: whether it fits, how fast it is, alternatives, limits and suggested changes.

    The last three take most of the time, and are computed when they are first used.
    """

    name: str
    choice: ResolvedRun
    _question: Question
    steps: int | None
    notes: tuple[str, ...]

    @cached_property
    def alternatives(self) -> tuple[ResolvedRun, ...]:
        """`choice` and one run for each other strategy that the devices allow, the fastest that fits first."""
        return tuple(alternatives(self.choice, self._question))

    @cached_property
    def limits(self) -> Limits:
        """The largest micro-batch, the longest sequence at a micro-batch of one, and the fewest devices."""
        return limits(self.choice, self._question)

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What makes a run fit that does not, cheapest first."""
        return () if self.fits else tuple(changes(self.choice, self._question))

    @property
    def fits(self) -> bool:
        return self.choice.fits

    @property
    def seconds(self) -> float | None:
        """Duration of the run without evaluation and checkpoints; None if its number of steps is unknown."""
        return None if self.steps is None else self.steps * self.choice.speed.step_seconds

    @property
    def goodput(self) -> Goodput:
        return self.choice.goodput(self.steps)

    @property
    def gpu_hours(self) -> float | None:
        return None if self.seconds is None else self.seconds * self.choice.run.world_size / HOUR

    @property
    def cost(self) -> float | None:
        price = self.choice.machine.price
        return None if self.gpu_hours is None or price is None else self.gpu_hours * price

    def as_dict(self) -> dict[str, Any]:
        """What `--json` prints; programs rely on `fits`, `memory`, `speed`, `chosen` and `alternatives`."""
        return {
            "fits": self.fits,
            "memory": memory_of(self.choice),
            "speed": {
                **speed_of(self.choice),
                "steps": self.steps,
                "seconds_to_finish": _rounded(self.seconds, 0),
                "gpu_hours": _rounded(self.gpu_hours, 2),
                "cost": _rounded(self.cost, 2),
            },
            "goodput": self.goodput.as_dict(),
            "chosen": {**_chosen(self.choice), "reason": self.choice.reason},
            "alternatives": [_alternative(one, self.steps) for one in self.alternatives],
            "limits": self.limits.as_dict(),
            "expected_error": error.as_dict() if (error := expected_error(self.choice.run)) else None,
            "changes": [change.as_dict() for change in self.changes],
            "model": _model(self.choice),
            "hardware": _hardware(self.choice.machine),
            "notes": list(self.notes),
        }


def make_plan(config: Config, *, system: str = "shoal", traits: Sequence[str] = ()) -> Plan:
    """The plan of `config`: the forecast of `shoal train` on the hardware it names. `system` and `traits` are the
    values of `--like` and `--trait`."""
    like, engine = read_like(system, traits), ENGINES[config.parallel.engine]
    like = Like(engine) if like.name == "shoal" else like
    shape, machine = read_shape(config.model), read_machine(config.hardware)
    config, defaults = _with_defaults(config, like.defaults, machine)
    config, other = with_global_batch(config, machine.world_size), like.traits(machine.gpu, shape.model_type)
    if config.train.precision == "16-true":  # as large and as fast as bf16, but for what is computed in fp32
        config, other = changed(config, {"train.precision": "bf16-true"}), replace(other, half=True)
    if other.unties_head:
        shape = replace(shape, tied=False)
    question = Question(config, shape, machine, other)
    choice = choose(config, shape, machine, traits=question.traits)
    notes = list(machine.notes)
    if (kind := unknown_architecture(config.model)) is not None:
        notes.append(
            f"The architecture {kind} is not known: it is forecast as a {shape.family} of the sizes in config.json, "
            "and its number of parameters may differ."
        )
    if modules := left_out_modules(config.model):
        notes.append(
            f"Only the text model is forecast; the {' and '.join(modules)} modules of {config.model.from_} are not."
        )
    if shape.routed and machine.world_size > 1:
        notes.append(
            "Experts are sharded like all other weights: expert parallelism, the usual layout of large "
            "mixture-of-experts models, is not forecast."
        )
    notes += _about_preference(config)
    if (warning := plan_attention(config, shape, machine).warning(config.data.max_length)) is not None:
        notes.append(warning)
    if like == Like(engine):
        notes += [f"shoal train does not accept this yet: {sentence}" for _, sentence in find_unbuilt(config)]
        refused = [*find_refused(shape, choice.config), *(sentence for _, sentence in find_untrained(config))]
        notes += [f"shoal train does not accept this: {sentence}" for sentence in refused]
        # What is described of the hardware has an effect here, if nowhere else.
        ignored = [note for note in without_effect(config, machine.world_size) if not note.startswith("hardware.")]
        notes += [*ignored, *unintended(choice)]
    else:
        notes.append(f"This forecast is for {like.shown}, not for shoal.")
        if config.train.precision == "bf16-true" and machine.gpu.bf16 is None:
            notes.append(f"{machine.gpu.name} has no bf16: 16-bit weights are in fp16.")
        if defaults:
            shown = ", ".join(f"{key} {shown_value(value)}" for key, value in defaults.items())
            notes.append(f"As {like.name} does by default, because the config does not say: {shown}.")
    notes += _about_the_host(choice)
    return Plan(
        name=config.name,
        choice=choice,
        _question=question,
        steps=count_steps(config, choice),
        notes=tuple(notes),
    )


def _about_the_host(choice: ResolvedRun) -> list[str]:
    """That the device waits for its host, if it does so for long: hosts differ far more than devices of one kind."""
    found = [choice.speed.step.find(name) for name in ("kernel launch overhead", "optimizer launch overhead")]
    share = sum(term.amount for term in found if term is not None) / choice.speed.step_seconds
    if share < WAITS_FOR_HOST or choice.machine.is_cpu:
        return []
    waits = f"The device waits {share:.0%} of the step for its host to launch kernels"
    if choice.machine.host_block_ms is not None:
        return [f"{waits}. A larger train.micro_batch hides that."]
    return [
        f"{waits}. That time differs by about a factor of two between hosts, so that this speed is less certain than "
        "others: shoal bench hardware measures it for hardware.host_block_ms. A larger train.micro_batch hides it."
    ]


def _with_defaults(config: Config, defaults: dict[str, Any], machine: Machine) -> tuple[Config, dict[str, Any]]:
    """The config with another system's defaults for the keys that it does not set, and these."""
    found = {}
    for key, value in defaults.items():
        block: Any = config
        *above, last = key.split(".")
        for name in above:
            block = getattr(block, name)
        lacks = key == "train.precision" and (machine.gpu.bf16 is None or machine.is_cpu)
        if last not in block.model_fields_set and not lacks:
            found[key] = value
    return changed(config, found), found


def _about_preference(config: Config) -> Iterator[str]:
    """What the forecast of preference tuning counts, and what it leaves out."""
    name = config.train.objective
    if objective_facts(name).pairs:
        yield (
            f"train.objective {name}: a sequence of data.max_length holds both answers of its pairs with their "
            "prompts; memory and time are those of its tokens."
        )
    if switches_adapter_off(config):
        yield (
            "The reference is a forward pass without the adapter for every micro-batch; its time is approximate, as if "
            "the adapter took part."
        )
    elif computes_before(config):
        yield (
            "The reference is computed once before the first step, by a forward pass over the data; it takes about a "
            "third of the time of training on it once, which the time to finish leaves out."
        )


def count_steps(config: Config, choice: ResolvedRun) -> int | None:
    """Optimizer steps of the run, if the config states them: epochs need the size of the data."""
    train = config.train
    if train.steps is not None:
        return train.steps
    if train.tokens is not None:
        return max(1, -(-train.tokens // choice.speed.tokens_per_step))
    return None


def memory_of(choice: ResolvedRun) -> dict[str, Any]:
    """The memory forecast, in GiB."""
    memory, worst = choice.memory, choice.memory.worst
    return {
        "allocated_gib": round(worst.allocated / GIB, 3),
        "reserved_gib": round(worst.reserved / GIB, 3),
        "device_gib": round(choice.machine.gpu.memory_gib, 2),
        "context_gib": round(memory.context / GIB, 2),
        "peak": worst.peak.name,
        "terms": worst.peak.tree.as_dict(GIB),
        "moments": {moment.name: round(moment.tree.amount / GIB, 3) for moment in worst.moments},
        "stages": [
            {
                "pipeline_rank": pipeline_rank.pipeline_rank,
                "allocated_gib": round(pipeline_rank.allocated / GIB, 3),
                "reserved_gib": round(pipeline_rank.reserved / GIB, 3),
                "peak": pipeline_rank.peak.name,
            }
            for pipeline_rank in memory.pipeline_ranks
        ],
        "host": {"gib": round(memory.host.amount / GIB, 3), "terms": memory.host.as_dict(GIB)},
    }


def speed_of(choice: ResolvedRun) -> dict[str, Any]:
    """The speed forecast."""
    speed = choice.speed
    each = speed.tokens_per_second_per_gpu
    return {
        "tokens_per_second_per_gpu": round(each, 1 if each > 100 else 3),
        "tokens_per_second": round(each * speed.world_size, 1),
        "mfu": round(speed.mfu, 4),
        "tflops_per_gpu": round(speed.flops_per_second_per_gpu / 1e12, 1),
        "step_seconds": round(speed.step_seconds, 6),
        "terms": speed.step.as_dict(1.0, 6),
    }


def _chosen(choice: ResolvedRun) -> dict[str, Any]:
    run = choice.run
    return {
        "name": choice.name,
        "strategy": run.strategy,
        "sharding": choice.config.parallel.sharding,
        "world_size": run.world_size,
        "data_parallel": run.mesh.data_parallel,
        "micro_batch": run.micro_batch,
        "grad_accum_steps": run.grad_accum_steps,
        "global_batch": run.global_batch,
        "mesh": asdict(run.mesh),
        "recompute": shown_recompute(run),
        "loss": run.loss,
        "compiled": run.compiled,
        "cuda_graphs": replays_graphs(run),
        "precision": run.precision,
        "checkpoint_every": choice.config.checkpoint.every,
    }


def _alternative(choice: ResolvedRun, steps: int | None) -> dict[str, Any]:
    speed = speed_of(choice)
    return {
        **_chosen(choice),
        "fits": choice.fits,
        "allocated_gib": round(choice.memory.worst.allocated / GIB, 2),
        "reserved_gib": round(choice.memory.reserved / GIB, 2),
        "tokens_per_second_per_gpu": speed["tokens_per_second_per_gpu"],
        "mfu": speed["mfu"],
        "step_seconds": speed["step_seconds"],
        "seconds_to_finish": _rounded(None if steps is None else steps * choice.speed.step_seconds, 0),
    }


def _model(choice: ResolvedRun) -> dict[str, Any]:
    run = choice.run
    whole = run.with_(mesh=type(run.mesh)())
    return {
        "family": run.shape.family,
        "parameters": parameters(run.shape),
        "trained": round(trained_parameters(whole, ranks(run.shape, 1, run.schedule)[0])),
    }


def _hardware(machine: Machine) -> dict[str, Any]:
    return {
        "gpu": machine.gpu.name,
        "devices": machine.devices,
        "nodes": machine.nodes,
        "link": machine.link.name,
        "network": machine.network.name if machine.nodes > 1 else None,
        "host_block_ms": machine.host_block_ms,
        "price": machine.price,
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
