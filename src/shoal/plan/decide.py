"""What `auto` means: the strategy, the micro-batch and the recomputation of a run, chosen by forecasting each.

Training and `shoal plan` call the same function, so that the plan is what is trained:

    choice = choose(config, shape, machine)
    choice.config     # the same config with every auto of these keys replaced
    choice.reason     # a sentence

`choice.chosen()` is what `plan.json` holds, and `choice.memory` and `choice.speed` are the forecast.

`shape` is the model's: `models.read_shape(config.model)`, or `likeness.shape_of_model(...)` where a transformers model
is at hand. `machine` is what it runs on: `machine.read_machine(config.hardware)` to plan for,
`machine.machine_at_hand(...)` to train on.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from shoal.catalogue.shapes import ModelShape
from shoal.config.mesh import mesh_for
from shoal.config.resolve import auto_precision, with_precision
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.plan.choose import Chosen, nearest_multiples
from shoal.plan.from_config import Execution, check_model, make_run, read_recompute, settled
from shoal.plan.machine import Machine
from shoal.plan.memory import Memory, forecast_memory
from shoal.plan.run import Run
from shoal.plan.speed import Speed, forecast_speed
from shoal.plan.systems import OURS, SystemTraits
from shoal.plan.terms import GIB

# Families that training has a plan for: see parallel/plans.py.
CAN_BE_CUT = ("llama", "mistral", "qwen2", "qwen3", "neox", "gpt2")
# On a CPU nothing overlaps, and past a few rows larger passes only take memory.
CPU_ROWS = 8
# Fewer, and a pipeline's devices wait too long for the first pass to arrive and the last to leave.
MICRO_BATCHES_PER_STAGE = 4
# What is chosen is to fit even where the forecast is a little low.
CAREFUL_SHARE = 0.94
# A simpler strategy is taken before one that is less than this faster.
WORTH = 0.03
# Of micro-batches that are about as fast, the largest is taken.
ALIKE = 0.01


@dataclass(frozen=True)
class Choice:
    """A way to carry out a run, with its forecast."""

    config: Config
    run: Run
    machine: Machine
    reason: str

    @cached_property
    def memory(self) -> Memory:
        return forecast_memory(self.run)

    @cached_property
    def speed(self) -> Speed:
        return forecast_speed(self.run)

    @cached_property
    def fits(self) -> bool:
        return fits(self.run, self.machine)

    @property
    def name(self) -> str:
        """The strategy as a person calls it, with what it is combined with."""
        run = self.run
        name = "hybrid" if run.strategy == "fsdp" and run.mesh.dp_replicate > 1 else run.strategy
        cuts = "".join(
            f" × {axis} {getattr(run.mesh, axis)}" for axis in ("tp", "pp", "cp") if getattr(run.mesh, axis) > 1
        )
        return name + cuts

    def chosen(self) -> Chosen:
        """As `plan.json` holds it."""
        run = self.run
        return Chosen(
            strategy=run.strategy,
            reason=self.reason,
            world_size=run.world_size,
            data_parallel=run.mesh.data_parallel,
            micro_batch=run.micro_batch,
            grad_accum_steps=run.grad_accum_steps,
            global_batch=run.global_batch,
            mesh=asdict(run.mesh),
            sharding=self.config.parallel.sharding,
            recompute=shown_recompute(run.recompute),
        )


def fits(run: Run, machine: Machine, share: float = 1.0) -> bool:
    """Whether a run fits into `share` of the devices' memory, and what is offloaded into the host's."""
    memory = forecast_memory(run)
    if not memory.fits(machine.gpu.memory_gib * share):
        return False
    return machine.host_gib is None or memory.host.amount * machine.devices / GIB <= machine.host_gib


def choose(
    config: Config,
    shape: ModelShape,
    machine: Machine,
    *,
    traits: SystemTraits = OURS,
    checked: bool = True,
    may_cut: bool = True,
) -> Choice:
    """The run as it would be carried out, with every auto replaced by what is fastest of what fits.

    Raises a UserMistake where the batch or the mesh does not go with the devices; with `checked` also where the model
    does not go with the config, as far as sizes tell: training, which has the model, knows better. Where neither copies
    nor shards fit, `may_cut` allows to cut tensors and stages. Where nothing fits, what comes nearest is returned, and
    its `fits` is false.
    """
    gpu = machine.gpu
    config = with_precision(config, auto_precision(is_cpu=gpu.is_cpu, has_bf16=gpu.bf16 is not None))
    if checked:
        check_model(shape, config, machine)
    options = list(_options(config, shape, machine, traits))
    chosen = next((option for option in options if option is not None and option[1]), None)
    if chosen is None and may_cut and (cut := _cut_further(config, shape, machine, traits)) is not None:
        return cut
    if chosen is None:
        least = min(options, key=lambda option: forecast_memory(option[0]).reserved)
        return _settle(config, machine, least[0], least[2])
    for option in options:
        faster = forecast_speed(option[0]).tokens_per_second_per_gpu
        if option[1] and faster > forecast_speed(chosen[0]).tokens_per_second_per_gpu * (1 + WORTH):
            chosen = option
    run, _, sharding = chosen
    return _settle(config, machine, run, sharding, _reason(config, machine, run, options))


_Option = tuple[Run, bool, str]  # the run, whether it fits, what fsdp shards


def _options(config: Config, shape: ModelShape, machine: Machine, traits: SystemTraits) -> Iterator[_Option]:
    """The best run of each strategy that may be taken, simplest first."""
    for strategy, sharding in strategies(config, machine):
        best: Run | None = None
        least: Run | None = None
        for recompute in recomputations(config):
            for rows in micro_batches(config, machine, strategy, sharding):
                run = make_run(config, shape, machine, Execution(strategy, sharding, rows, recompute), traits=traits)
                if least is None or forecast_memory(run).reserved < forecast_memory(least).reserved:
                    least = run
                if not fits(run, machine, _share(config)):
                    break  # nor would more rows
                if best is None or _better(run, best):
                    best = run
        assert least is not None, "a batch has a micro-batch"
        yield (best, True, sharding) if best is not None else (least, fits(least, machine), sharding)


def _cut_further(config: Config, shape: ModelShape, machine: Machine, traits: SystemTraits) -> Choice | None:
    """The fastest that fits of runs whose tensors are cut within each machine, and whose blocks are stages across
    machines; for a strategy that is left open, and families that training can cut."""
    parallel = config.parallel
    open_to_it = parallel.strategy == "auto" and parallel.tp * parallel.pp * parallel.cp == 1
    if not open_to_it or machine.is_cpu or machine.world_size == 1 or shape.family not in CAN_BE_CUT:
        return None
    found = []
    for tensors in (1, 2, 4, 8):
        for stages in sorted({1, machine.nodes}):
            if tensors * stages == 1 or tensors > machine.devices or config.data.max_length % tensors:
                continue
            cut = parallel.model_copy(update={"strategy": "fsdp", "tp": tensors, "pp": stages})
            try:
                found.append(choose(config.model_copy(update={"parallel": cut}), shape, machine, traits=traits))
            except UserMistake:  # heads, blocks or the batch do not divide so
                continue
    best = max((one for one in found if one.fits), key=lambda one: one.speed.tokens_per_second_per_gpu, default=None)
    if best is None:
        return None
    return replace(best, reason="copies and shards alone do not fit, so tensors or stages are cut too")


def _share(config: Config) -> float:
    """Careful where something is chosen; exact where everything is given."""
    given = config.parallel.strategy != "auto" and config.train.micro_batch != "auto"
    return 1.0 if given and config.train.recompute != "auto" else CAREFUL_SHARE


def _better(run: Run, other: Run) -> bool:
    new, old = (forecast_speed(one).tokens_per_second_per_gpu for one in (run, other))
    if abs(new / old - 1) > ALIKE:
        return new > old
    return run.recompute == other.recompute and run.micro_batch > other.micro_batch


def strategies(config: Config, machine: Machine) -> list[tuple[str, str]]:
    """(strategy, sharding) that the config allows, simplest first."""
    parallel = config.parallel
    if parallel.strategy != "auto":
        return [(settled(config, machine, parallel.strategy), parallel.sharding)]
    if parallel.offload == "cpu":
        return [("fsdp", parallel.sharding)]
    if machine.world_size == 1:
        return [("single", parallel.sharding)]
    found: list[tuple[str, str]] = [("ddp", parallel.sharding)]
    if machine.is_cpu or parallel.sharding == "no_shard":  # processes of a CPU share one memory: nothing is saved
        return found
    if machine.world_size > parallel.tp * parallel.pp:
        found.append(("fsdp", parallel.sharding))
        if machine.nodes > 1 and parallel.sharding == "full_shard" and parallel.pp == 1:
            found.append(("fsdp", "hybrid_shard"))
    return found


def recomputations(config: Config) -> list[str | int]:
    """What `train.recompute` may be, least first."""
    wanted = config.train.recompute
    if wanted != "auto":
        return [read_recompute(wanted)]
    # Selective recomputation goes back through a block once, and zero-bubble schedules do so twice.
    twice = config.parallel.pp > 1 and config.parallel.pp_schedule == "zero-bubble"
    return ["none", "cheap", "full"] if twice else ["none", "cheap", "selective", "full"]


def micro_batches(config: Config, machine: Machine, strategy: str, sharding: str) -> list[int]:
    """What `train.micro_batch` may be."""
    train = config.train
    if train.micro_batch != "auto":
        return [train.micro_batch]
    parallel = config.parallel.model_copy(update={"sharding": sharding})
    mesh = mesh_for(parallel, strategy, machine.world_size, nodes=machine.nodes)
    if train.global_batch % mesh.data_parallel:
        near = nearest_multiples(train.global_batch, mesh.data_parallel)
        raise UserMistake(
            f"train.global_batch {train.global_batch} does not divide over {mesh.data_parallel} data-parallel devices; "
            f"the nearest that do are {near}."
        )
    rows = train.global_batch // mesh.data_parallel
    found = [size for size in range(1, rows + 1) if rows % size == 0]
    if mesh.pp > 1 and parallel.pp_schedule != "1f1b":
        # Passes go through such a pipeline in rounds of equal size.
        equal = [size for size in found if not rows // size % max(1, rows // size // mesh.pp)]
        found = equal or found
    if machine.is_cpu:
        # The forecast is no measure there: as many as are allowed, and of a pipeline's passes some for each stage.
        most = CPU_ROWS if mesh.pp == 1 else min(CPU_ROWS, rows // (MICRO_BATCHES_PER_STAGE * mesh.pp))
        return [max((size for size in found if size <= most), default=found[0])]
    # More than two dozen candidates are no better a choice than every other of them.
    return found if len(found) <= 24 else found[:: len(found) // 24 + 1] + found[-1:]


def shown_recompute(recompute: str | int) -> str:
    """What is recomputed, as a person says it."""
    return f"every {recompute}" if isinstance(recompute, int) else recompute


def _settle(config: Config, machine: Machine, run: Run, sharding: str, reason: str = "") -> Choice:
    """The config with what was chosen in it."""
    recompute: Any = run.recompute
    if isinstance(recompute, int):
        recompute = config.train.recompute
    chosen = config.model_copy(
        update={
            "parallel": config.parallel.model_copy(update={"strategy": run.strategy, "sharding": sharding}),
            "train": config.train.model_copy(update={"micro_batch": run.micro_batch, "recompute": recompute}),
        }
    )
    if not reason:
        needed = forecast_memory(run).reserved / GIB
        asked = "asked for" if config.parallel.strategy != "auto" else "what comes nearest"
        reason = f"{asked}; it needs {needed:.0f} GiB of the {machine.gpu.memory_gib:.0f} GiB that a device has"
    return Choice(chosen, run, machine, reason)


def _reason(config: Config, machine: Machine, run: Run, options: list[_Option]) -> str:
    wanted, memory = config.parallel.strategy, machine.gpu.memory_gib
    needed = forecast_memory(run).reserved / GIB
    if config.parallel.offload == "cpu" and wanted == "auto":
        return "for parallel.offload cpu"
    if wanted != "auto":
        if run.strategy != wanted:
            if machine.world_size == 1:
                return f"{wanted} on one device is single"
            if config.parallel.sharding == "no_shard":
                return "fsdp with no_shard is ddp"
            return f"one copy of the model over all devices, so {wanted} has nothing to shard over"
        return "asked for"
    if machine.world_size == 1:
        return "one device"
    if machine.is_cpu:
        return "no device memory to run out of"
    if run.strategy == "ddp":
        return f"{needed:.0f} GiB fit on each device, and nothing is faster"
    replicated = next((option for option in options if option[0].strategy == "ddp"), None)
    if run.mesh.dp_replicate > 1:
        return "sharded within each machine: between them the network is the narrower way"
    if replicated is not None and not replicated[1]:
        whole = forecast_memory(replicated[0]).reserved / GIB
        return f"one device has {memory:.0f} GiB, and the whole model would need {whole:.0f}"
    return "faster than ddp, which averages whole gradients"
