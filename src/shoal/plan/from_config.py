"""From a config to a run: what training would do with it on a machine, as far as arithmetic can know."""

from dataclasses import dataclass

from shoal.catalogue.shapes import ModelShape
from shoal.config.mesh import mesh_for
from shoal.config.schema import Config, OffloadConfig, RecomputeConfig
from shoal.mistakes import UserMistake, suggestion
from shoal.plan.blocks import linears
from shoal.plan.choose import nearest_multiples
from shoal.plan.frozen import trained_shares
from shoal.plan.habits import OURS, Habits
from shoal.plan.head import CHUNK_LOGITS
from shoal.plan.machine import Machine
from shoal.plan.models import has_dropout
from shoal.plan.run import FROZEN, SHARDED, Adapter, Run, Trained

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# PowerSGD sends two thin matrices instead of a gradient: next to nothing for large ones.
POWER_BYTES = 1


@dataclass(frozen=True)
class Carried:
    """How a run is carried out, where the config leaves it open."""

    strategy: str
    sharding: str
    micro_batch: int
    recompute: str | int


def make_run(config: Config, shape: ModelShape, machine: Machine, carried: Carried, *, habits: Habits = OURS) -> Run:
    """The run of `config` on `machine`; a UserMistake where its batch or its mesh does not go with the devices."""
    parallel, train = config.parallel.model_copy(update={"sharding": carried.sharding}), config.train
    mesh = mesh_for(parallel, carried.strategy, machine.world_size, nodes=machine.nodes)
    passes = count_passes(train.global_batch, carried.micro_batch, mesh.data_parallel)
    compiled = not machine.is_cpu if train.compile == "auto" else train.compile in (True, "thunder")
    mixed = train.precision in ("bf16-mixed", "16-mixed", "fp8")
    # One pass on one device: nothing is added to gradients, so they stay as they were computed.
    small = mixed and not machine.is_cpu and carried.strategy == "single" and passes == 1
    small = small and train.optimizer.name in ("adamw", "adamw8bit")  # whose kernel reads either
    keeps = carried.strategy == "zero2" or (carried.strategy == "fsdp" and carried.sharding == "shard_grad_op")
    adapter = read_adapter(config, shape)
    return Run(
        shape=shape,
        gpu=machine.gpu,
        link=machine.link,
        network=machine.network,
        devices=machine.devices,
        length=config.data.max_length,
        mesh=mesh,
        strategy=carried.strategy,
        micro_batch=carried.micro_batch,
        passes=passes,
        precision=train.precision,
        reduce_bytes=BYTES[train.reduce_dtype] if mixed else (2 if train.precision == "bf16-true" else 4),
        optimizer=train.optimizer.name,
        momentum=train.optimizer.momentum > 0,
        clips=train.clip is not None,
        recompute=carried.recompute,
        compiled=compiled,
        loss=choose_loss(config, shape, carried.micro_batch * config.data.max_length // mesh.cp),
        attention="eager" if config.model.attention == "eager" else "flash",
        packed=_masked(config) and not (compiled and config.parallel.cp == 1),
        dropout=has_dropout(config.model),
        reshard=False if keeps else (True if parallel.reshard == "auto" else parallel.reshard),
        prefetch=parallel.prefetch,
        offload=_offload(config),
        compress_bytes={"none": 0, "powersgd": POWER_BYTES}.get(parallel.compress, 2),
        schedule=parallel.pp_schedule,
        cp_method=parallel.cp_method,
        adapter=adapter,
        trained=FROZEN if adapter is not None else _trained(config, shape),
        gradient_bytes=2 if small else 0,
        async_checkpoint=config.checkpoint.async_,
        habits=habits,
    )


def count_passes(global_batch: int, micro_batch: int, data_parallel: int) -> int:
    """Passes of a step; a UserMistake where the batch does not divide."""
    if global_batch % data_parallel:
        raise UserMistake(
            f"train.global_batch {global_batch} does not divide over {data_parallel} data-parallel devices; "
            f"the nearest that do are {nearest_multiples(global_batch, data_parallel)}."
        )
    rows = global_batch // data_parallel
    if rows % micro_batch:
        unit = micro_batch * data_parallel
        raise UserMistake(
            f"train.global_batch {global_batch} is not a multiple of micro_batch {micro_batch} × {data_parallel} "
            f"devices = {unit}; the nearest that are: {nearest_multiples(global_batch, unit)}."
        )
    return rows // micro_batch


def check_model(shape: ModelShape, config: Config, machine: Machine) -> None:
    """A UserMistake where the model cannot be cut or adapted as the config says, or the device not compute so."""
    parallel = config.parallel
    for what, size in (("attention heads", shape.heads), ("key and value heads", shape.kv_heads), ("ffn", shape.ffn)):
        if size % parallel.tp:
            raise UserMistake(f"parallel.tp {parallel.tp} does not divide the model's {size} {what}.")
    stages = parallel.pp * (1 if parallel.pp_schedule == "1f1b" else 2)
    if parallel.pp > 1 and shape.layers < stages:
        raise UserMistake(
            f"parallel.pp {parallel.pp} with pp_schedule {parallel.pp_schedule} makes {stages} stages, but the model "
            f"has {shape.layers} blocks, and each stage needs one."
        )
    precision, gpu = config.train.precision, machine.gpu
    if precision == "fp8" and gpu.fp8 is None:
        raise UserMistake(f"train.precision fp8 needs 8-bit matrix products, which {gpu.name} has not; use bf16-mixed.")
    if precision.startswith("bf16") and gpu.bf16 is None:
        raise UserMistake(f"train.precision {precision}: {gpu.name} has no bf16; use 16-mixed.")
    names = [one.name for one in linears(shape)]
    for target in config.adapter.targets if config.adapter.kind != "none" and config.adapter.targets != "auto" else ():
        if target not in names:
            raise UserMistake(
                f"adapter.targets: no linear layer of a {shape.family} block is called {target}."
                f"{suggestion(target, names)} The names are {', '.join(names)}."
            )


def choose_loss(config: Config, shape: ModelShape, tokens: int) -> str:
    """As `models.loss.choose_loss`, from sizes alone."""
    wanted = config.train.loss_impl
    if shape.family == "bert":  # its head is more than one matrix
        return "plain"
    if wanted != "auto":
        return wanted
    if config.train.precision == "16-mixed":
        return "plain"
    return "chunked" if tokens * shape.vocab > CHUNK_LOGITS else "plain"


def read_recompute(wanted: str | RecomputeConfig) -> str | int:
    """`train.recompute` other than auto."""
    return wanted.every if isinstance(wanted, RecomputeConfig) else wanted


def read_adapter(config: Config, shape: ModelShape) -> Adapter | None:
    """The adapters that the config asks for."""
    wanted = config.adapter
    if wanted.kind == "none":
        return None
    targets = [one.name for one in linears(shape)] if wanted.targets == "auto" else list(wanted.targets)
    quantize = wanted.quantize if wanted.kind == "qlora" else None
    return Adapter(wanted.rank, tuple(targets), quantize, dora=wanted.dora, dropout=wanted.dropout > 0)


def settled(config: Config, machine: Machine, strategy: str) -> str:
    """What becomes of a strategy on these devices: one device has nothing to share, one copy nothing to shard."""
    parallel, world = config.parallel, machine.world_size
    if strategy == "single" and world > 1:
        raise UserMistake(f"parallel.strategy is single, but there are {world} processes; use ddp or fsdp.")
    if parallel.offload == "cpu":
        return strategy if strategy in SHARDED else "fsdp"
    if world == 1:
        return "single"
    if strategy == "fsdp" and parallel.sharding == "no_shard":
        return "ddp"
    if strategy != "ddp" and world == parallel.tp * parallel.pp:
        return "ddp"
    return strategy


def _trained(config: Config, shape: ModelShape) -> Trained:
    return trained_shares(shape, config.model.freeze)


def _masked(config: Config) -> bool:
    """Whether rows hold several documents that must not see each other; plain text runs on over row ends."""
    data = config.data
    instructions = data.source in ("json", "parquet", "csv", "hf") and data.format not in ("text",)
    return data.pack and instructions and data.path is not None


def _offload(config: Config) -> str:
    wanted = config.parallel.offload
    if isinstance(wanted, OffloadConfig):
        return "nvme" if wanted.optimizer == "nvme" else "optimizer"
    return wanted
