"""Apply every parallelism and training technique to a model, in the one order that works.

Pipeline stages → tensor parallelism → context parallelism → float8 → activation checkpointing → compile → FSDP and
weights, or weights and DDP. The model stays on the meta device until its weights are materialized, so that a rank
allocates memory for its own shard only.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.catalogue.strategies import find_strategy
from shoal.config.mesh import Mesh, length_multiple
from shoal.config.schema import Config
from shoal.data.loader import MicroBatch
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy, read_anatomy
from shoal.models.attention import NARROWEST, skips_tiles
from shoal.models.emulate import EmulatedForward
from shoal.models.float8 import MULTIPLE
from shoal.models.loss import LanguageModel, choose_loss
from shoal.models.tensor_slices import Split
from shoal.models.weights import Weights, kept_buffers, materialize
from shoal.parallel.compile import compile_backend, compile_blocks
from shoal.parallel.context import SequenceShard, split_sequence
from shoal.parallel.float8 import float8_fraction, use_float8
from shoal.parallel.gradients import Gradients
from shoal.parallel.micro_batches import MicroBatchRunner, Prepare
from shoal.parallel.model import ParallelModel, Runner
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.patch import patch
from shoal.parallel.pipeline import Pipeline, Stage
from shoal.parallel.placement import Placement
from shoal.parallel.precision import ComputeCopies, Precision, cast_norm_outputs, read_precision
from shoal.parallel.ranks import Ranks
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.shard import replicate, shard_fully
from shoal.parallel.stages import StageModel, split_stages, stages_per_rank
from shoal.parallel.tensor import split_tensors
from shoal.parallel.units import choose_units
from shoal.parallel.vocabulary import VocabularyShard

# Few enough distinct sequence lengths for the compiler, at little padding.
ROUND_LENGTHS_TO = 64
# The user is told when fp8 applies to a smaller fraction of the blocks' weights.
MOSTLY = 0.9


def parallelize(
    model: Any,
    config: Config,
    *,
    strategy: str,
    mesh: Mesh,
    ranks: Ranks,
    micro_batch: int,
    grad_accum_steps: int,
    folder: Path | None,
    values: bool = True,
    emulated: frozenset[torch.dtype] = frozenset(),
) -> ParallelModel:
    """Parallelize `model` over `mesh`. The model is on the meta device, and its frozen parameters are already frozen.

    Weights are read from `folder` or, if that is None, initialized from the seed. With `values` false they are left
    uninitialized, because a checkpoint will be loaded into them. Matmuls of the dtypes in `emulated` are computed in
    fp32: see `models.emulate`.
    """
    parallel_dims = ParallelDims(mesh, ranks)
    sharded = find_strategy(strategy).fully_shard
    precision = read_precision(config.train.precision, config.train.reduce_dtype)
    if parallel_dims.gradient_ranks > 1:
        _ = parallel_dims.replicas  # creating a group is collective: also for ranks that never reduce over it
    anatomy = read_anatomy(model)
    everything: dict[str, Tensor] = {**dict(model.named_parameters()), **kept_buffers(model)}
    shapes = {name: tuple(tensor.shape) for name, tensor in everything.items()}
    loss = _choose_loss(model, anatomy, config, precision, micro_batch, mesh)

    splits: dict[str, Split] = {}
    sequence: SequenceShard | None = None
    modules: list[nn.Module] = []
    parameters: dict[str, nn.Parameter] = {}
    stages = _stages(model, anatomy, config, parallel_dims)
    backend = compile_backend(config.train.compile, ranks.device)
    compiled = backend == "inductor" and ranks.device.type == "cuda"
    tiles = mesh.cp == 1 and skips_tiles(model, config.model.attention, compiled=compiled)
    for stage in stages:
        # First: tensor parallelism patches the same norms, and must gather what they have cast.
        if precision.mixed:
            cast_norm_outputs(stage.model, stage.anatomy, precision.compute)
        # Before anything that depends on the shape of a weight.
        if parallel_dims.tp is not None:
            splits |= split_tensors(stage.model, stage.anatomy, parallel_dims.tp)
        if parallel_dims.cp is not None:
            sequence = split_sequence(stage.model, parallel_dims.cp, config.parallel.cp_method)
        module = _with_loss(stage, loss, parallel_dims, splits, precision, tiles)
        blocks = stage.anatomy.block_modules(stage.model)
        # After tensor parallelism, which decides whether the sides of a matrix fit float8 kernels.
        if config.train.precision == "fp8":
            use_float8(blocks)
        if precision.compute in emulated:
            # A compiled block is traced once, inside the whole module, and its graph contains what it recomputes.
            recomputed = blocks if config.train.recompute not in ("none", "cheap") and backend is None else []
            for part in (module, *recomputed):
                patch(part, EmulatedForward, emulated=emulated)
        recompute_blocks(blocks, config.train.recompute)
        # After activation checkpointing, so that the compiled graph contains the recomputation.
        if backend is not None:
            compile_blocks([*blocks, *_final_norm(stage)], backend, keeps_all=config.train.recompute == "none")
        # FSDP before materialization: memory is then allocated for this rank's shard only.
        if sharded:
            _shard(module, stage, config, strategy, parallel_dims, precision)
        materialize(
            stage.model,
            stage.anatomy,
            device=ranks.device,
            dtype=precision.weights,
            source=Weights(folder, config.seed) if values else None,
            splits=splits,
            offload=config.parallel.offload == "cpu",
        )
        parameters |= dict(stage.model.named_parameters())
        # DDP after materialization: it cannot wrap a module on meta.
        if not sharded:
            module = _replicate(module, stage, config, parallel_dims, precision)
        modules.append(module)

    prepare = _preparation(sequence, ranks.device, fill=mesh.tp > 1 or mesh.pp > 1)
    runner: Runner
    if mesh.pp == 1:
        runner = MicroBatchRunner(modules[0], prepare, keeps_weights=_reshards(config, strategy) is False)
    else:
        indices = [stage.index for stage in stages]
        runner = _pipeline(
            model, modules, indices, config, parallel_dims, precision, micro_batch, grad_accum_steps, prepare
        )
    # DDP reduces all gradients over the replicas, FSDP those of the parameters it shards. Neither reduces the gradients
    # of replicated pipeline stages: `Gradients` does.
    wrapped = mesh.pp == 1 and not sharded
    tied = {f"{anatomy.embedding}.weight"} if mesh.pp > 1 and anatomy.tied else set()
    placement = Placement(parallel_dims, shapes, splits, tied_across_stages=frozenset(tied & parameters.keys()))
    return ParallelModel(
        modules=modules,
        runner=runner,
        parallel_dims=parallel_dims,
        anatomy=anatomy,
        precision=precision,
        placement=placement,
        parameters=parameters,
        buffers={name: buffer for stage in stages for name, buffer in kept_buffers(stage.model).items()},
        gradients=Gradients(
            parameters,
            placement,
            averages=[] if wrapped else [name for name, one in parameters.items() if not isinstance(one, DTensor)],
            in_buckets=isinstance(modules[0], DistributedDataParallel),
        ),
        copies=[copies for module in modules for copies in module.modules() if isinstance(copies, ComputeCopies)],
        sequence_length=config.data.max_length if mesh.pp > 1 or (compiled and config.data.pack) else None,
        sequence_multiple=_sequence_multiple(config, compiled=compiled),
        notes=list(_notes(model, stages, config, loss, compiled=backend is not None, tiles=tiles)),
    )


def _choose_loss(
    model: Any, anatomy: Anatomy, config: Config, precision: Precision, micro_batch: int, mesh: Mesh
) -> str:
    # A chunked loss computes its gradients before loss scaling, and in fp16 the smallest of them would underflow.
    wanted = "plain" if config.train.loss_impl == "auto" and precision.scaled else config.train.loss_impl
    tokens = micro_batch * config.data.max_length // mesh.cp
    return choose_loss(wanted, anatomy, tokens, model.config.get_text_config().vocab_size)


def _notes(
    model: Any, stages: list[StageModel], config: Config, loss: str, *, compiled: bool, tiles: bool
) -> Iterator[str]:
    name = type(model).__name__
    if config.train.precision == "fp8":
        fraction = float8_fraction([block for stage in stages for block in stage.anatomy.block_modules(stage.model)])
        if fraction < MOSTLY:
            yield (
                f"train.precision fp8 applies to {fraction:.0%} of the weights in {name}'s blocks: the others are not "
                f"linear layers whose dimensions are multiples of {MULTIPLE}, and stay in bf16."
            )
    if config.train.loss_impl in ("chunked", "fused") and loss == "plain":
        chosen = config.train.loss_impl
        yield f"train.loss_impl {chosen} has no effect: the lm_head of {name} is not a single linear layer."
    if config.train.recompute == "cheap" and not compiled:
        yield "train.recompute cheap has no effect: it is a choice of the compiler, and blocks are not compiled here."
    if config.model.attention == "flex" and not tiles:
        yield (
            f"model.attention flex has no effect: it needs CUDA, compiled blocks, and a model with a head dimension of "
            f"at least {NARROWEST} and neither a sliding window nor dropout in its attention; {name} is trained with "
            "sdpa or eager attention."
        )


def _stages(model: Any, anatomy: Anatomy, config: Config, parallel_dims: ParallelDims) -> list[StageModel]:
    """The part of the model that runs on this rank: all of it, or this rank's pipeline stages."""
    devices = parallel_dims.mesh.pp
    if devices == 1:
        return [StageModel(0, 1, model, anatomy)]
    if anatomy.tied:
        _ = parallel_dims.embedding_group  # creating a group is collective: also for the stages between
    per_rank = stages_per_rank(config.parallel.pp_schedule)
    indices = [parallel_dims.coordinate["pp"] + devices * turn for turn in range(per_rank)]
    return split_stages(model, anatomy, indices, devices * per_rank)


def _final_norm(stage: StageModel) -> list[nn.Module]:
    """Empty if the model has no final norm, or if another stage holds it."""
    name = stage.anatomy.final_norm
    return [stage.model.get_submodule(name)] if name is not None and stage.is_last else []


def _with_loss(
    stage: StageModel,
    loss: str,
    parallel_dims: ParallelDims,
    splits: dict[str, Split],
    precision: Precision,
    tiles: bool,
) -> nn.Module:
    measure = None
    name = f"{stage.anatomy.embedding if stage.anatomy.tied else stage.anatomy.head}.weight"
    if parallel_dims.tp is not None and name in splits:
        ((start, _),) = splits[name].spans
        measure = VocabularyShard(start, parallel_dims.tp)
    matmul_dtype = precision.compute if precision.mixed else None
    inner = LanguageModel(stage.model, stage.anatomy, loss, measure, skips_tiles=tiles, matmul_dtype=matmul_dtype)
    return inner if stage.count == 1 else Stage(inner, is_first=stage.is_first, is_last=stage.is_last)


def _shard(
    module: nn.Module,
    stage: StageModel,
    config: Config,
    strategy: str,
    parallel_dims: ParallelDims,
    precision: Precision,
) -> None:
    language = module.inner if isinstance(module, Stage) else module
    assert isinstance(language, LanguageModel)
    shard_fully(
        module,
        choose_units(language, config.parallel.wrap, part=stage.count > 1),
        parallel_dims.sharding,
        precision,
        reshard=_reshards(config, strategy),
        prefetch=config.parallel.prefetch,
        offload=config.parallel.offload == "cpu",
    )


def _replicate(
    module: nn.Module, stage: StageModel, config: Config, parallel_dims: ParallelDims, precision: Precision
) -> nn.Module:
    if precision.mixed:
        units = [[block] for block in stage.anatomy.block_modules(stage.model)]
        if last := _final_norm(stage):
            # A chunked loss uses the head's weight without calling the head, but always after the final norm.
            units.append([*last, stage.model.get_submodule(stage.anatomy.head)])
        module = ComputeCopies(module, precision, units)
    # DDP would reduce a stage's gradients in every micro-batch of the schedule: `Gradients` does it once, at the end.
    if parallel_dims.mesh.pp == 1 and parallel_dims.gradient_ranks > 1:
        module = replicate(module, parallel_dims.replicas, precision, parallel_dims.device, config.parallel.compress)
    return module


def _pipeline(
    model: Any,
    modules: list[nn.Module],
    indices: list[int],
    config: Config,
    parallel_dims: ParallelDims,
    precision: Precision,
    micro_batch: int,
    grad_accum_steps: int,
    prepare: Prepare,
) -> Pipeline:
    assert parallel_dims.pp is not None
    length = config.data.max_length // parallel_dims.mesh.cp
    return Pipeline(
        list(zip(indices, modules, strict=True)),
        count=parallel_dims.mesh.pp * stages_per_rank(config.parallel.pp_schedule),
        group=parallel_dims.pp,
        schedule=config.parallel.pp_schedule,
        grad_accum_steps=grad_accum_steps,
        prepare=prepare,
        tokens=(micro_batch, length),
        hidden=(micro_batch, length // parallel_dims.mesh.tp, model.config.get_text_config().hidden_size),
        dtype=precision.stream,
        device=parallel_dims.device,
    )


def _reshards(config: Config, strategy: str) -> bool | int:
    """FSDP's `reshard_after_forward`: whether weights are freed after the forward pass, or the size to reshard to."""
    parallel = config.parallel
    if parallel.pp > 1:  # a stage would all-gather its weights again for every micro-batch of the schedule
        return False
    if find_strategy(strategy, parallel.sharding).keeps_weights:
        return False
    return True if parallel.reshard == "auto" else parallel.reshard


def _sequence_multiple(config: Config, *, compiled: bool) -> int:
    """Sequence lengths are rounded up to a multiple of this: the compiler specializes kernels to each length."""
    multiple = length_multiple(config.parallel, config.train.precision)
    rounded = math.lcm(multiple, ROUND_LENGTHS_TO)
    return rounded if compiled and config.data.max_length % rounded == 0 else multiple


def _preparation(sequence: SequenceShard | None, device: torch.device, fill: bool) -> Prepare:
    """Move a micro-batch to the device, and shard its sequences or add position ids where the model needs that."""

    def prepare(batch: MicroBatch) -> MicroBatch:
        batch = batch.to(device)
        if sequence is not None:
            return sequence.shard(batch)
        if fill and batch.positions is None:
            # transformers would number the tokens of its input, which may be a shard of the sequence.
            positions = torch.arange(batch.inputs.shape[1], device=device).expand(batch.inputs.shape)
            return replace(batch, positions=positions)
        return batch

    return prepare


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze the parameters whose names match one of `patterns`."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            raise UserMistake(f"model.freeze: {pattern!r} matches no parameter; one is named {names[0]}.")
    for name, parameter in model.named_parameters():
        if any(fnmatch(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserMistake("model.freeze leaves no parameter to train.")
