"""Resolves `auto`: the strategy, micro-batch and activation checkpointing of a run, chosen by forecasting each option.

Training and `shoal plan` call the same function, so that the plan is what is trained:

    choice = choose(config, shape, machine)
    choice.config     # the config with every auto of these keys resolved
    choice.reason     # a sentence

`choice` is a `ResolvedRun`: `choice.as_dict()` is what `plan.json` holds, and `choice.memory` and `choice.speed` are
the forecast.

`shape` is the model's: `models.read_shape(config.model)`, or `from_model.shape_of_model(...)` of a transformers model.
`machine` is the hardware: `machine.read_machine(config.hardware)` to plan for, `machine.machine_at_hand(...)` to train
on.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shoal.catalogue.families import PLANS
from shoal.catalogue.shapes import ModelShape
from shoal.config.mesh import mesh_for
from shoal.config.resolve import auto_precision, with_global_batch, with_precision
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.plan.batches import divisors, nearest_multiples
from shoal.plan.check import check_choice, check_model, is_trainable
from shoal.plan.from_config import Execution, effective_strategy, make_run, read_recompute
from shoal.plan.goodput import forecast_goodput
from shoal.plan.machine import Machine
from shoal.plan.memory.forecast import forecast_memory
from shoal.plan.resolved import ResolvedRun, fits
from shoal.plan.run.run import Run
from shoal.plan.speed.forecast import forecast_speed
from shoal.plan.systems.modelled import OURS
from shoal.plan.systems.traits import SystemTraits
from shoal.plan.terms import GIB

# On a CPU nothing overlaps, so micro-batches beyond a few sequences only take memory.
MAX_CPU_MICRO_BATCH = 8
# With fewer, the pipeline bubble is too large.
MICRO_BATCHES_PER_STAGE = 4
# Share of the device memory that a choice may use: it has to fit even if the forecast is a little low.
CAREFUL_SHARE = 0.94
# A simpler strategy is preferred unless another one is faster by more than this.
WORTH = 0.03
# A difference below this is none.
WORTH_NAMING = 0.005
# Among micro-batches whose speeds differ by less than this, the largest is chosen.
ALIKE = 0.01


def choose(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    *,
    traits: SystemTraits = OURS,
    checked: bool = True,
    allow_model_parallel: bool = True,
) -> ResolvedRun:
    """Resolve every auto of `config` to the fastest option that fits.

    Raises a UserMistake if the batch or the mesh does not match the devices; with `checked` also if the model does not
    match the config, as far as sizes tell (training has the model and checks it itself). If neither replicas nor shards
    fit, `allow_model_parallel` allows tensor and pipeline parallelism. If nothing fits, the option that needs least
    memory is returned, and its `fits` is false.
    """
    gpu, native = machine.gpu, traits == OURS
    config = with_precision(config, auto_precision(is_cpu=gpu.is_cpu, has_bf16=gpu.bf16 is not None))
    config = with_global_batch(config, machine.world_size)
    if checked:
        check_model(shape, config, machine, native=native)
    options = list(_options(config, shape, machine, traits))
    chosen = next((option for option in options if option is not None and option[1]), None)
    if (
        chosen is None
        and allow_model_parallel
        and (cut := _with_model_parallel(config, shape, machine, traits)) is not None
    ):
        return cut
    if chosen is None:
        least = min(options, key=lambda option: forecast_memory(option[0]).allocated)
        choice = _make_choice(config, machine, least[0], least[2])
    else:
        for option in options:
            faster = forecast_speed(option[0]).tokens_per_second_per_gpu
            if option[1] and faster > forecast_speed(chosen[0]).tokens_per_second_per_gpu * (1 + WORTH):
                chosen = option
        run, _, sharding = chosen
        choice = _make_choice(config, machine, run, sharding, _reason(config, machine, run, options))
    if checked and native:
        check_choice(choice)
    return choice


_Option = tuple[Run, bool, str]  # the run, whether it fits, what fsdp shards


def _options(config: Config, shape: ModelShape, machine: Machine, traits: SystemTraits) -> Iterator[_Option]:
    """The best run of each allowed strategy, simplest first."""
    for strategy, sharding in strategies(config, machine, traits):
        best: Run | None = None
        least: Run | None = None
        for recompute in recomputations(config):
            if recompute == "offload" and best is not None:
                break  # it is as fast as full, and needs the link to the host: only if nothing else fits
            possible: list[Run] = []
            for micro_batch in micro_batches(config, machine, strategy, sharding):
                run = make_run(
                    config, shape, machine, Execution(strategy, sharding, micro_batch, recompute), traits=traits
                )
                if least is None or forecast_memory(run).allocated < forecast_memory(least).allocated:
                    least = run
                if forecast_memory(run).exceeds(machine.gpu.memory_gib * _share(config)):
                    break  # so would a larger micro-batch
                possible.append(run)
            best = _fastest(possible, best, machine, _share(config))
        assert least is not None, "a batch has a micro-batch"
        yield (best, True, sharding) if best is not None else (least, fits(least, machine), sharding)


def _fastest(possible: list[Run], best: Run | None, machine: Machine, share: float) -> Run | None:
    """The best of these runs with ever larger micro-batches that fits, or `best`. Whether a run fits is a longer
    question than how fast it is, so that the best is asked first; if it does not fit, nor do larger ones."""
    while possible:
        wanted = best
        for run in possible:
            if wanted is None or _better(run, wanted):
                wanted = run
        assert wanted is not None
        if wanted is best or fits(wanted, machine, share):
            return wanted
        possible = possible[: possible.index(wanted)]
    return best


def _with_model_parallel(
    config: Config, shape: ModelShape, machine: Machine, traits: SystemTraits
) -> ResolvedRun | None:
    """The fastest run that fits with tensor parallelism within each node and pipeline parallelism across nodes; only if
    the strategy is auto and the family supports both."""
    parallel = config.parallel
    is_open = parallel.strategy == "auto" and parallel.tp * parallel.pp * parallel.cp == 1
    is_open = is_open and parallel.engine == "native"
    if not is_open or machine.is_cpu or machine.world_size == 1 or shape.model_type not in PLANS:
        return None
    found = []
    for tensors in (1, 2, 4, 8):
        for stages in sorted({1, machine.nodes}):
            if tensors * stages == 1 or tensors > machine.devices or config.data.max_length % tensors:
                continue
            split = parallel.model_copy(update={"strategy": "fsdp", "tp": tensors, "pp": stages})
            candidate = config.model_copy(update={"parallel": split})
            if not is_trainable(shape, candidate):  # such as muon, which needs whole matrices
                continue
            try:
                found.append(choose(candidate, shape, machine, traits=traits))
            except UserMistake:  # heads, blocks or the batch are not divisible
                continue
    best = max((one for one in found if one.fits), key=lambda one: one.speed.tokens_per_second_per_gpu, default=None)
    if best is None:
        return None
    return replace(
        best,
        requested=config,
        reason="neither DDP nor FSDP fits alone; tensor or pipeline parallelism is added",
    )


def _share(config: Config) -> float:
    """The usable share of memory: with a margin if something is chosen, all of it if everything is given."""
    given = config.parallel.strategy != "auto" and config.train.micro_batch != "auto"
    return 1.0 if given and config.train.recompute != "auto" else CAREFUL_SHARE


def _better(run: Run, other: Run) -> bool:
    new, old = (forecast_speed(one).tokens_per_second_per_gpu for one in (run, other))
    if abs(new / old - 1) > ALIKE:
        return new > old
    return run.recompute == other.recompute and run.micro_batch > other.micro_batch


def strategies(config: Config, machine: Machine, traits: SystemTraits = OURS) -> list[tuple[str, str]]:
    """(strategy, sharding) that the config allows, simplest first."""
    parallel = config.parallel
    if parallel.strategy != "auto":
        return [(effective_strategy(config, machine, parallel.strategy, traits), parallel.sharding)]
    if parallel.offload == "cpu":
        return [("fsdp", parallel.sharding)]
    if machine.world_size == 1:
        return [("single", parallel.sharding)]
    found: list[tuple[str, str]] = [("ddp", parallel.sharding)]
    if (
        machine.is_cpu or parallel.sharding == "no_shard"
    ):  # processes on a CPU share one memory, so sharding saves nothing
        return found
    if machine.world_size > parallel.tp * parallel.pp:
        found.append(("fsdp", parallel.sharding))
        if machine.nodes > 1 and parallel.sharding == "full_shard" and parallel.pp == 1:
            found.append(("fsdp", "hybrid_shard"))
    return found


def recomputations(config: Config) -> list[str | int]:
    """Candidates for `train.recompute`, least recomputation first."""
    wanted = config.train.recompute
    if wanted != "auto":
        return [read_recompute(wanted)]
    # Selective checkpointing supports one backward pass per block, and zero-bubble schedules make two.
    twice = config.parallel.pp > 1 and config.parallel.pp_schedule == "zero-bubble"
    # Nor units inside a block, which `parallel.wrap` may select: only the model tells.
    unusual = twice or config.parallel.wrap != "auto"
    return ["none", "cheap", *([] if unusual else ["selective"]), "full", "offload"]


def micro_batches(config: Config, machine: Machine, strategy: str, sharding: str) -> list[int]:
    """Candidates for `train.micro_batch`."""
    train = config.train
    if train.micro_batch != "auto":
        return [train.micro_batch]
    parallel = config.parallel.model_copy(update={"sharding": sharding})
    mesh = mesh_for(parallel, strategy, machine.world_size, nodes=machine.nodes)
    if train.global_batch % mesh.data_parallel:
        near = nearest_multiples(train.global_batch, mesh.data_parallel)
        small = train.global_batch < mesh.data_parallel
        fewer = "; or set parallel.tp, cp or pp, which leave fewer data-parallel ranks" if small else ""
        raise UserMistake(
            f"train.global_batch {train.global_batch} is not divisible by the {mesh.data_parallel} data-parallel "
            f"ranks; the nearest values that are: {near}{fewer}."
        )
    per_rank = train.global_batch // mesh.data_parallel
    found = divisors(per_rank)
    if mesh.pp > 1 and parallel.pp_schedule != "1f1b":
        # These schedules run micro-batches in rounds of equal size.
        equal = [size for size in found if not per_rank // size % max(1, per_rank // size // mesh.pp)]
        found = equal or found
    if machine.is_cpu:
        # CPU speed is not forecast: take the largest allowed, with several micro-batches per pipeline stage.
        most = (
            MAX_CPU_MICRO_BATCH
            if mesh.pp == 1
            else min(MAX_CPU_MICRO_BATCH, per_rank // (MICRO_BATCHES_PER_STAGE * mesh.pp))
        )
        return [max((size for size in found if size <= most), default=found[0])]
    # Forecasting more than two dozen candidates costs time and hardly improves the choice.
    return found if len(found) <= 24 else found[:: len(found) // 24 + 1] + found[-1:]


def _make_choice(config: Config, machine: Machine, run: Run, sharding: str, reason: str = "") -> ResolvedRun:
    """The choice, with the chosen values in its config."""
    recompute: Any = run.recompute if config.train.recompute == "auto" else config.train.recompute
    chosen = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"strategy": run.strategy, "sharding": sharding}),
            "train": config.train.model_copy(update={"micro_batch": run.micro_batch, "recompute": recompute}),
        }
    )
    if config.checkpoint.every == "auto":
        every = forecast_goodput(config, run, machine, forecast_speed(run).step_seconds, None).best_every
        chosen = chosen.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"every": every})})
    if not reason:
        memory, most = forecast_memory(run), machine.gpu.memory_gib
        needed, context = memory.reserved / GIB, memory.context / GIB
        least = "needs the least memory of all data-parallel strategies"
        asked = "set in the config" if config.parallel.strategy != "auto" else least
        shown = f"{needed:.0f} GiB per device, which has {most:.0f} GiB"
        if needed < most < needed + context:
            shown = f"{needed + context:.1f} GiB per device with the CUDA context, which has {most:.1f} GiB"
        elif round(needed) == round(most):
            shown = f"{needed:.1f} GiB per device, which has {most:.1f} GiB"
        reason = f"{asked}; needs {shown}"
    return ResolvedRun(config, chosen, run, machine, reason)


def _reason(config: Config, machine: Machine, run: Run, options: list[_Option]) -> str:
    wanted, memory = config.parallel.strategy, machine.gpu.memory_gib
    if config.parallel.offload == "cpu" and wanted == "auto":
        return "required by parallel.offload cpu"
    if wanted != "auto":
        if run.strategy != wanted:
            if machine.world_size == 1:
                return f"{wanted} on one device is the same as single"
            if config.parallel.sharding == "no_shard":
                return "fsdp with no_shard is the same as ddp"
            return f"one data-parallel rank, so {wanted} has nothing to shard over"
        return "set in the config"
    if machine.world_size == 1:
        return "one device"
    if machine.is_cpu:
        return "processes on a CPU share its memory, so sharding saves nothing"
    if run.strategy == "ddp":
        needed = forecast_memory(run).reserved / GIB
        return f"needs {needed:.0f} GiB per device, which fits{_beside_sharding(run, options)}"
    replicated = next((option for option in options if option[0].strategy == "ddp"), None)
    if run.mesh.dp_replicate > 1:
        return "sharded within each node and replicated across nodes, because the network between nodes is slower"
    if replicated is not None and not replicated[1]:
        whole = forecast_memory(replicated[0]).reserved / GIB
        return f"unsharded training needs {whole:.0f} GiB; one device has {memory:.0f}"
    return "faster than ddp, which all-reduces full gradients"


def _beside_sharding(run: Run, options: list[_Option]) -> str:
    """How much faster the best sharded option would be than `run`, which was chosen although it may be slower."""
    sharded = [forecast_speed(one).tokens_per_second_per_gpu for one, fits, _ in options if fits and one.sharded]
    if not sharded:
        return ""
    gain = max(sharded) / forecast_speed(run).tokens_per_second_per_gpu - 1
    if gain < WORTH_NAMING:
        return ", and sharding is no faster"
    return f"; sharding would be only {gain:.1%} faster"
