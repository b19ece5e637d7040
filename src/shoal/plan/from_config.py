"""Translates a config into the `Run` that the forecast is computed from."""

from dataclasses import dataclass, replace
from fnmatch import fnmatch
from math import ceil

from shoal.catalogue.attention import AMPERE, EAGER, SHORTER, Attention, Heads, Path, choose_attention_path
from shoal.catalogue.objectives import objective_facts
from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.shapes import ModelShape
from shoal.catalogue.strategies import find_strategy
from shoal.config.engine import uses_deepspeed
from shoal.config.mesh import mesh_for
from shoal.config.reference import switches_adapter_off
from shoal.config.schema import AdapterConfig, Config, OffloadConfig, RecomputeConfig
from shoal.mistakes import UserMistake
from shoal.plan.batches import divisors, nearest_multiples
from shoal.plan.machine import Machine
from shoal.plan.memory.head import CHUNK_LOGITS
from shoal.plan.models import drops_attention, has_dropout
from shoal.plan.run.blocks import linears
from shoal.plan.run.frozen import also_trained_shares, unfrozen_shares
from shoal.plan.run.run import Adapter, Run, Trained
from shoal.plan.systems.modelled import OURS
from shoal.plan.systems.traits import SystemTraits

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# PowerSGD communicates two low-rank factors instead of a gradient: a small share for large matrices.
POWERSGD_BYTES = 1
# Layers of types that are forecast as Llamas and join what is apart there.
JOINING = ("phi3",)
JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
KEPT_SIZES = 32  # models/cross_entropy.py


@dataclass(frozen=True)
class Execution:
    """The values of the keys that a config may leave at auto."""

    strategy: str
    sharding: str
    micro_batch: int
    recompute: str | int


def make_run(
    config: Config, shape: ModelShape, machine: Machine, execution: Execution, *, traits: SystemTraits = OURS
) -> Run:
    """The run of `config` on `machine`; a UserMistake if its batch or its mesh does not match the devices."""
    parallel, train = config.parallel.model_copy(update={"sharding": execution.sharding}), config.train
    mesh = mesh_for(parallel, execution.strategy, machine.world_size, nodes=machine.nodes)
    grad_accum_steps = count_grad_accum_steps(train.global_batch, execution.micro_batch, mesh.data_parallel)
    compiled = is_compiled(config, machine)
    mixed = train.precision in ("bf16-mixed", "16-mixed", "fp8")
    # One micro-batch on one device: gradients are not accumulated, so they stay in the compute dtype.
    small = mixed and not machine.is_cpu and execution.strategy == "single" and grad_accum_steps == 1 and traits == OURS
    small = small and find_optimizer(train.optimizer.name).own_kernel
    keeps = find_strategy(execution.strategy, execution.sharding).keeps_weights
    adapter, facts = read_adapter(config, shape), objective_facts(train.objective)
    if adapter is not None and adapter.quantize is not None:
        wide = traits.wide_base and train.precision == "bf16-mixed"
        # FSDP's units need one dtype, so that scripts for it leave the rest in 16 bits.
        shards = find_strategy(execution.strategy, execution.sharding).fully_shard
        adapter = replace(adapter, upcasts=wide or (traits.upcasts_base and not shards))
    attention = plan_attention(config, shape, machine).path
    if traits != OURS:
        attention = _attention_elsewhere(config, shape, machine, traits)
    return Run(
        shape=shape,
        gpu=machine.gpu,
        link=machine.link,
        network=machine.network,
        devices=machine.devices,
        host_block_ms=machine.host_block_ms,
        length=config.data.max_length,
        mesh=mesh,
        strategy=execution.strategy,
        micro_batch=execution.micro_batch,
        grad_accum_steps=grad_accum_steps,
        precision=train.precision,
        fp8_head=train.precision == "fp8" and train.fp8_head,
        reduce_bytes=_reduce_bytes(config, traits),
        optimizer=train.optimizer.name,
        momentum=train.optimizer.momentum > 0,
        optimizer_in_backward=train.optimizer.in_backward,
        paged_optimizer=train.optimizer.paged,
        optimizer_ranks=_optimizer_ranks(config, execution, mesh.gradient_ranks),
        clips=train.clip is not None,
        recompute=execution.recompute,
        recomputed_parts=_recomputed_parts(config) if execution.recompute == "parts" else (),
        recomputed_blocks=_recomputed_blocks(config) if execution.recompute == "full" else 0,
        compiled=compiled,
        cuda_graphs=train.cuda_graphs,
        loss=choose_loss(config, shape, execution.micro_batch * config.data.max_length // mesh.cp),
        attention=attention,
        attention_dropout=drops_attention(config.model),
        dropout=has_dropout(config.model) or (traits != OURS and _drops_elsewhere(config, shape)),
        reshard=False if keeps else (True if parallel.reshard == "auto" else parallel.reshard),
        prefetch=parallel.prefetch,
        offload=_offload(config),
        compress_bytes={"none": 0, "powersgd": POWERSGD_BYTES}.get(parallel.compress, 2),
        schedule=parallel.pp_schedule,
        virtual_stages=0 if parallel.pp_stages == "auto" else parallel.pp_stages,
        sequence_parallel=parallel.sequence_parallel,
        cp_method=parallel.cp_method,
        head_share=head_share(config, traits),
        of_answers=facts.of_answers,
        reference_pass=switches_adapter_off(config),
        adapter=adapter,
        trained=_trained(config, shape),
        gradient_bytes=2 if small else 0,
        async_checkpoint=config.checkpoint.async_,
        varied_lengths=traits != OURS and not (packs(config) or traits.pads_to_length),
        traits=traits,
    )


def _reduce_bytes(config: Config, traits: SystemTraits) -> int:
    """Bytes per gradient that is reduced, as the config says; else those of a gradient."""
    train = config.train
    narrow = train.precision == "bf16-true" or (train.precision == "fp8" and traits.narrow_weights)
    if narrow or (traits.masters_with_optimizer and "reduce_dtype" not in train.model_fields_set):
        return 2
    return 4 if train.precision == "32-true" else BYTES[train.reduce_dtype]


def head_share(config: Config, traits: SystemTraits = OURS) -> float:
    """The share of tokens with logits: of a masked language model the masked ones, rounded up as
    `models.cross_entropy.kept_tokens` does, if the system gathers them; of a classifier one per sequence."""
    if config.train.objective == "masked_lm":
        if not traits.gathers_masked:
            return 1.0
        return min(1.0, ceil(config.train.mask_ratio * KEPT_SIZES) / KEPT_SIZES)
    return 1 / config.data.max_length if config.train.objective == "classify" else 1.0


def is_compiled(config: Config, machine: Machine) -> bool:
    """Whether blocks are compiled. Under DeepSpeed's engine they are not."""
    wanted = config.train.compile
    if uses_deepspeed(config):
        return False
    return not machine.is_cpu if wanted == "auto" else wanted in (True, "thunder")


def plan_attention(config: Config, shape: ModelShape, machine: Machine) -> Attention:
    """How attention is computed, as `parallel.apply` selects it."""
    wanted = config.model.attention
    if shape.model_type == "falcon" and shape.kv_heads == 1:
        because = "transformers' falcon gives SDPA one head of keys for all queries, which no fused kernel supports"
        return Attention("scores", because, SHORTER)
    heads = Heads(
        4 if config.train.precision == "32-true" else 2,
        shape.head_size,
        shape.head_size,
        drops_attention(config.model),
        machine.gpu.compute_capability,
    )
    return choose_attention_path(
        heads,
        shape.model_type,
        cpu=machine.is_cpu,
        grouped=shape.kv_heads != shape.heads,
        compiled=config.train.compile in ("auto", True) and wanted in ("auto", "flex"),
        eager=wanted == "eager",
        windowed=bool(shape.sliding_window and shape.sliding_window < config.data.max_length),
        documents=has_documents(config),
        sharded=config.parallel.cp > 1,
    )


def _attention_elsewhere(config: Config, shape: ModelShape, machine: Machine, traits: SystemTraits) -> Path:
    """The same of other systems, whose kernels for sliding windows are not known."""
    wanted = config.model.attention
    eager = traits.eager_attention == "always" or (traits.eager_attention == "types" and shape.model_type in EAGER)
    if wanted == "eager" or (wanted == "auto" and eager):
        return "scores"
    if has_documents(config):
        return "fused" if traits.variable_lengths else "dense mask"
    # SDPA has no fused kernel for grouped keys in fp32 and before Ampere, unless they are repeated for every query.
    flash = (machine.gpu.compute_capability or AMPERE) >= AMPERE and config.train.precision != "32-true"
    grouped = shape.kv_heads != shape.heads and traits.grouped_attention and not traits.repeats_keys
    grouped = grouped and not machine.is_cpu
    return "fused" if flash or not grouped else "scores"


def _drops_elsewhere(config: Config, shape: ModelShape) -> bool:
    """Whether other systems train with dropout on hidden states: encoders have it, unless the config says 0."""
    return config.model.dropout is None and not shape.traits.causal and shape.traits.hidden_dropout


def count_grad_accum_steps(global_batch: int, micro_batch: int, data_parallel: int) -> int:
    """Micro-batches per step; a UserMistake if the batch is not divisible."""
    if global_batch % data_parallel:
        raise UserMistake(
            f"train.global_batch {global_batch} is not divisible by the {data_parallel} data-parallel ranks; "
            f"the nearest values that are: {nearest_multiples(global_batch, data_parallel)}."
        )
    per_rank = global_batch // data_parallel
    if per_rank % micro_batch:
        unit = micro_batch * data_parallel
        raise UserMistake(
            f"train.global_batch {global_batch} is not a multiple of micro_batch {micro_batch} × {data_parallel} "
            f"ranks = {unit}; the nearest values that are: {nearest_multiples(global_batch, unit)}."
        )
    return per_rank // micro_batch


def _optimizer_ranks(config: Config, execution: Execution, data_parallel: int) -> int:
    """Ranks that share the optimizer state, of `data_parallel` ranks; 0: all of them."""
    wanted = config.parallel.optimizer_ranks
    if wanted == "auto" or not find_strategy(execution.strategy, execution.sharding).partitions_update:
        return 0
    if data_parallel % wanted:
        shown = ", ".join(str(one) for one in divisors(data_parallel))
        raise UserMistake(
            f"parallel.optimizer_ranks {wanted} does not divide the number of ranks with the same weights, which is "
            f"{data_parallel}; use auto or one of {shown}."
        )
    return wanted


def choose_loss(config: Config, shape: ModelShape, tokens: int) -> str:
    """Same as `models.loss.choose_loss`, from sizes alone."""
    wanted = config.train.loss_impl
    if shape.traits.head_transform:
        return "plain"
    if wanted != "auto":
        return wanted
    return "chunked" if tokens * shape.vocab > CHUNK_LOGITS or config.train.fp8_head else "plain"


def read_recompute(wanted: str | RecomputeConfig) -> str | int:
    """The value of `train.recompute`, if it is not auto."""
    if isinstance(wanted, RecomputeConfig):
        return "parts" if wanted.parts else "full" if wanted.first is not None else wanted.every
    return "parts" if wanted == "attention" else wanted


def _recomputed_parts(config: Config) -> tuple[str, ...]:
    wanted = config.train.recompute
    return wanted.parts if isinstance(wanted, RecomputeConfig) else ("attention",)


def _recomputed_blocks(config: Config) -> int:
    wanted = config.train.recompute
    return (wanted.first or 0) if isinstance(wanted, RecomputeConfig) else 0


def read_adapter(config: Config, shape: ModelShape) -> Adapter | None:
    """The adapters that the config asks for."""
    wanted = config.adapter
    if wanted.kind == "none":
        return None
    targets = tuple(one.name for one in linears(shape) if is_adapted(wanted, one.name, shape))
    quantize = wanted.quantize.removeprefix("bnb.").removesuffix("-dq") if wanted.kind == "qlora" else None
    return Adapter(
        wanted.rank,
        targets,
        quantize,
        double_quantized=wanted.quantize.endswith("-dq"),
        dora=wanted.dora,
        dropout=wanted.dropout > 0,
    )


def is_adapted(adapter: AdapterConfig, linear: str, shape: ModelShape) -> bool:
    """Whether a linear layer of the blocks gets an adapter."""
    return isinstance(adapter.targets, str) or any(selects(target, linear, shape) for target in adapter.targets)


def selects(target: str, linear: str, shape: ModelShape) -> bool:
    """Whether an entry of `adapter.targets` selects a linear layer of the blocks, as in `models.adapters`."""
    name = shape.traits.names.weight(linear, 0).removesuffix(".weight")
    if linear in JOINED.get(target, ()) and shape.model_type in JOINING:
        return True
    return name == target or name.endswith(f".{target}") or linear == target or fnmatch(name, target)


def effective_strategy(config: Config, machine: Machine, strategy: str, traits: SystemTraits = OURS) -> str:
    """The strategy that `strategy` amounts to on these devices: one device is single, one data-parallel rank is ddp.
    DeepSpeed's and Megatron's optimizers have their buckets and hooks on one rank too."""
    parallel, world = config.parallel, machine.world_size
    if strategy == "single" and world > 1:
        raise UserMistake(f"parallel.strategy is single, but there are {world} processes; use ddp or fsdp.")
    if parallel.offload == "cpu":
        return strategy if find_strategy(strategy).fully_shard else "fsdp"
    if traits.masters_with_optimizer and strategy.startswith("zero"):
        return strategy
    if world == 1:
        return "single"
    if (same := find_strategy(strategy, parallel.sharding)).ddp and same.name != strategy:
        return same.name
    if strategy != "ddp" and world == parallel.tp * parallel.pp:
        return "ddp"
    return strategy


def _trained(config: Config, shape: ModelShape) -> Trained:
    if config.adapter.kind != "none":
        return also_trained_shares(shape, config.adapter.train_also)
    return unfrozen_shares(shape, config.model.freeze)


def has_documents(config: Config) -> bool:
    """Whether sequences hold documents that must not attend to each other, for which attention needs a mask; packed
    plain text does not."""
    data = config.data
    if objective_facts(config.train.objective).encoder:  # one document per sequence, of which some may be padded
        return data.path is not None and not packs(config)
    instructions = not data.kinds <= {"text", "tokens", "chess", "cells"} and data.format != "text"
    given = data.path is not None or not isinstance(data.source, str)
    packed = data.document_mask or (bool(data.pack) and instructions and given)
    return packed or objective_facts(config.train.objective).of_answers


def packs(config: Config) -> bool:
    """Whether sequences are filled up with several documents, as far as the config tells."""
    if not objective_facts(config.train.objective).encoder:
        return bool(config.data.pack)
    return config.data.pack is True or config.data.kinds == {"tokens"}


def _offload(config: Config) -> str:
    wanted = config.parallel.offload
    if isinstance(wanted, OffloadConfig):
        return "nvme" if wanted.optimizer == "nvme" else "optimizer"
    return wanted
