"""Apply every parallelism and training technique to a model, in the one order that works.

Pipeline stages → tensor parallelism → context parallelism → float8 or NF4 → adapters → activation checkpointing →
compile → FSDP and weights, or weights and DDP. The model stays on the meta device until its weights are materialized,
so that a rank allocates memory for its own shard only.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.catalogue.attention import NARROWEST, Attention
from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.strategies import find_strategy
from shoal.config.engine import uses_deepspeed, zero_stage
from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.models.anatomy import Anatomy, read_anatomy, require_blocks
from shoal.models.attention import attention_of, skips_tiles
from shoal.models.buffers import kept_buffers
from shoal.models.emulate import EmulatedForward
from shoal.models.loss import LossFactory, choose_loss
from shoal.models.peft_config import adapter_folder
from shoal.models.prepare import PreparedModel
from shoal.models.tensor_slices import Split
from shoal.models.weights import Weights, materialize
from shoal.parallel.adapters import check_adapters, use_adapters, use_quantized
from shoal.parallel.compile import compile_backend, compile_blocks, sequence_multiple
from shoal.parallel.context import SequenceShard, check_context_parallel, preparation, split_sequence
from shoal.parallel.cuda_graphs import GraphRunner
from shoal.parallel.deepspeed import check_deepspeed
from shoal.parallel.float8 import float8_notes, use_float8, uses_float8_head
from shoal.parallel.gradients import Gradients
from shoal.parallel.micro_batches import MicroBatchRunner
from shoal.parallel.model import ParallelModel, Runner
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.patch import patch
from shoal.parallel.pipeline import Stage, make_pipeline
from shoal.parallel.placement import Placement
from shoal.parallel.precision import ComputeCopies, Precision, cast_norm_outputs, read_precision
from shoal.parallel.ranks import Ranks
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.shard import replicate_stage, reshards_after_forward, shard_stage
from shoal.parallel.stages import StageModel, check_pipeline, stages_of_rank
from shoal.parallel.tensor import VocabularyShard, check_tensor_parallel, split_tensors
from shoal.parallel.units import choose_blocks
from shoal.parallel.zero_rows import shard_rows
from shoal.plan.from_config import has_documents, packs

SHARD_INSTEAD = "use parallel.strategy fsdp with parallel.wrap {min_params: 10_000_000}, which needs none"


def parallelize(
    prepared: PreparedModel,
    config: Config,
    *,
    objective: LossFactory,
    strategy: str,
    mesh: Mesh,
    ranks: Ranks,
    micro_batch: int,
    grad_accum_steps: int,
    values: bool = True,
    resumes: bool = False,
    emulated: frozenset[torch.dtype] = frozenset(),
    cuda_graphs: bool = False,
) -> ParallelModel:
    """Parallelize a model over `mesh`, with the loss of `objective`.

    Weights are read from its folder or, without one, initialized from the seed. With `values` false they are left
    uninitialized. If the run `resumes`, its checkpoint holds the adapter, wherever that started from. Matmuls of the
    dtypes in `emulated` are computed in fp32: see `models.emulate`. `cuda_graphs`: micro-batches are replayed.
    """
    model = prepared.model
    recipe = _read_recipe(
        prepared, config, objective, strategy, ParallelDims(mesh, ranks), micro_batch, grad_accum_steps
    )
    parallel_dims, precision, backend = recipe.parallel_dims, recipe.precision, recipe.backend
    adapted = prepared.adapters is not None
    done = _Applied(stages_of_rank(model, recipe.anatomy, config.parallel.pp_schedule, parallel_dims))
    for stage in done.stages:
        # First: tensor parallelism patches the same norms, and must gather what they have cast.
        if precision.autocast is not None:
            cast_norm_outputs(stage.model, stage.anatomy, precision.compute)
        # Before anything that depends on the shape of a weight.
        if parallel_dims.tp is not None:
            done.splits |= split_tensors(stage.model, stage.anatomy, parallel_dims.tp)
        if parallel_dims.cp is not None:
            done.sequence = split_sequence(stage.model, parallel_dims.cp, config.parallel.cp_method)
        module = _with_loss(stage, recipe, done.splits)
        # After tensor parallelism, which decides whether the sides of a matrix fit float8 kernels.
        if config.train.precision == "fp8":
            use_float8(stage.blocks)
        if adapted:
            use_quantized(stage.model, precision.compute)
        # After everything that replaces the matmul of a base layer.
        if adapted:
            # For speed, so in compiled blocks; the compiler does not support state within activation checkpointing.
            together = config.parallel.wrap == "auto" and config.train.recompute in ("none", "cheap")
            use_adapters(stage.model, stage.anatomy, together=together and backend is not None)
        if precision.compute in emulated:
            _emulate_matmuls(module, stage.blocks, recipe, emulated)
        recompute_blocks(stage.blocks, config.train.recompute)
        # After activation checkpointing, so that the compiled graph contains the recomputation.
        if backend is not None:
            compile_blocks(stage.blocks + stage.final_norm, backend, keeps_all=config.train.recompute == "none")
        # FSDP before materialization: memory is then allocated for this rank's shard only.
        if recipe.fully_shard:
            shard_stage(module, stage, config.parallel, strategy, parallel_dims, precision)
        elif recipe.zero_stage == 3:
            shard_rows(stage.model, parallel_dims.replicas)
        materialize(
            stage.model,
            stage.anatomy,
            device=ranks.device,
            dtype=recipe.stored_dtype,
            frozen=precision.frozen,
            host=recipe.zero_stage > 0,
            source=_weights(prepared, config, resumes=resumes) if values else None,
            splits=done.splits,
            offload=config.parallel.offload == "cpu",
        )
        done.parameters |= dict(stage.model.named_parameters())
        # DDP after materialization: it cannot wrap a module on meta.
        if not recipe.fully_shard:
            module = replicate_stage(module, stage, config.parallel, parallel_dims, precision)
        done.modules.append(module)
    return _finish(model, recipe, done, cuda_graphs=cuda_graphs)


def _weights(prepared: PreparedModel, config: Config, *, resumes: bool) -> Weights:
    start_from = config.adapter.from_ if not resumes and prepared.adapters is not None else None
    adapter = None if start_from is None else adapter_folder(start_from)
    return Weights(prepared.folder, config.seed, prepared.new_rows, adapter)


def check_parallel(model: Any, config: Config, *, strategy: str, mesh: Mesh, grad_accum_steps: int) -> None:
    """Raise a UserMistake unless `model`, on the meta device, can be parallelized so: before processes, memory or a run
    folder exist."""
    anatomy, parallel, train = read_anatomy(model), config.parallel, config.train
    optimizer = find_optimizer(train.optimizer.name)
    needs_blocks = {
        "parallel.tp": (mesh.tp > 1, SHARD_INSTEAD),
        "parallel.pp": (mesh.pp > 1, SHARD_INSTEAD),
        "train.recompute": (train.recompute != "none", "use none"),
        optimizer.name: (optimizer.elsewhere is not None, f"use {optimizer.elsewhere}"),
    }
    for key, (asked, instead) in needs_blocks.items():
        if asked:
            require_blocks(anatomy, model, key, instead)
    check_pipeline(model, anatomy, mesh.pp, parallel.pp_schedule, grad_accum_steps)
    check_tensor_parallel(model, mesh.tp)
    check_adapters(model, config, mesh)
    check_context_parallel(model, mesh, parallel.cp_method, config.data.max_length)
    if uses_deepspeed(config):
        check_deepspeed(config)
    elif find_strategy(strategy).fully_shard:
        choose_blocks(model, anatomy, parallel.wrap)


@dataclass(frozen=True)
class _Recipe:
    """What is decided before the model is changed."""

    config: Config
    objective: LossFactory
    strategy: str
    parallel_dims: ParallelDims
    micro_batch: int
    grad_accum_steps: int
    anatomy: Anatomy  # of the complete model
    shapes: dict[str, tuple[int, ...]]  # of its parameters and buffers; with an adapter, of the trained ones
    precision: Precision
    loss: str
    backend: str | None  # of torch.compile; None: blocks run eagerly
    compiled: bool  # to CUDA kernels
    tiles: bool  # attention skips fully masked tiles
    stored_dtype: torch.dtype  # in which weights are read or initialized
    zero_stage: int  # of DeepSpeed's engine, which casts, moves and shards the materialized model itself; 0: none of it

    @property
    def fully_shard(self) -> bool:
        return self.config.parallel.engine == "native" and find_strategy(self.strategy).fully_shard


@dataclass
class _Applied:
    """What has been done to the stages of this rank."""

    stages: list[StageModel]
    modules: list[nn.Module] = field(default_factory=list)  # with the loss and all wrappers
    splits: dict[str, Split] = field(default_factory=dict)
    sequence: SequenceShard | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def _read_recipe(
    prepared: PreparedModel,
    config: Config,
    objective: LossFactory,
    strategy: str,
    parallel_dims: ParallelDims,
    micro_batch: int,
    grad_accum_steps: int,
) -> _Recipe:
    model, anatomy = prepared.model, prepared.anatomy
    if parallel_dims.gradient_ranks > 1:
        _ = parallel_dims.replicas  # creating a group is collective: also for ranks that never reduce over it
    mesh, device = parallel_dims.mesh, parallel_dims.device
    adapted = prepared.adapters is not None
    precision = read_precision(config.train.precision, config.train.reduce_dtype, adapter=adapted)
    stored_dtype, stage = precision.weights, 0
    if uses_deepspeed(config):
        stage = zero_stage(strategy, config.parallel.sharding)
        precision = precision.low if stage > 0 else precision
    everything: dict[str, Tensor] = {**dict(model.named_parameters()), **kept_buffers(model)}
    if adapted:
        everything = {name: one for name, one in everything.items() if one.requires_grad}
    backend = None if uses_deepspeed(config) else compile_backend(config.train.compile, device)
    compiled = backend == "inductor" and device.type == "cuda"
    return _Recipe(
        config,
        objective,
        strategy,
        parallel_dims,
        micro_batch,
        grad_accum_steps,
        anatomy=anatomy,
        shapes={name: tuple(tensor.shape) for name, tensor in everything.items()},
        precision=precision,
        loss=_choose_loss(model, anatomy, config, micro_batch, mesh),
        backend=backend,
        compiled=compiled,
        tiles=mesh.cp == 1 and skips_tiles(model, config.model.attention, compiled=compiled),
        stored_dtype=stored_dtype,
        zero_stage=stage,
    )


def _choose_loss(model: Any, anatomy: Anatomy, config: Config, micro_batch: int, mesh: Mesh) -> str:
    tokens = micro_batch * config.data.max_length // mesh.cp
    wanted = config.train.loss_impl
    if wanted == "auto" and uses_float8_head(config) and anatomy.linear_head:
        return "chunked"
    return choose_loss(wanted, anatomy, tokens, model.config.get_text_config().vocab_size)


def _with_loss(stage: StageModel, recipe: _Recipe, splits: dict[str, Split]) -> nn.Module:
    """The stage as the objective's module: from a micro-batch to the loss, or to what the next stage needs."""
    parallel_dims, precision, measure = recipe.parallel_dims, recipe.precision, None
    name = f"{stage.anatomy.embedding if stage.anatomy.tied else stage.anatomy.head}.weight"
    if parallel_dims.tp is not None and name in splits:
        ((start, _),) = splits[name].spans
        measure = VocabularyShard(start, parallel_dims.tp)
    inner = recipe.objective.module(
        stage.model, stage.anatomy, recipe.loss, measure, skips_tiles=recipe.tiles, matmul_dtype=precision.autocast
    )
    inner.sequence_group = parallel_dims.cp
    inner.head_and_loss.float8 = uses_float8_head(recipe.config)
    inner.windows_in_tiles = _attention(stage.model, recipe, documents=False).path == "tiles"
    return inner if stage.count == 1 else Stage(inner, is_first=stage.is_first, is_last=stage.is_last)


def _attention(model: Any, recipe: _Recipe, *, documents: bool) -> Attention:
    config, parallel_dims = recipe.config, recipe.parallel_dims
    return attention_of(
        model,
        config.model.attention,
        longest=config.data.max_length,
        itemsize=recipe.precision.compute.itemsize,
        device=parallel_dims.device,
        compiled=recipe.compiled,
        documents=documents,
        sharded=parallel_dims.cp is not None,
    )


def _emulate_matmuls(
    module: nn.Module, blocks: list[nn.Module], recipe: _Recipe, emulated: frozenset[torch.dtype]
) -> None:
    # A compiled block is traced once, inside the whole module, and its graph contains what it recomputes.
    is_recomputed = recipe.config.train.recompute not in ("none", "cheap") and recipe.backend is None
    for part in (module, *(blocks if is_recomputed else [])):
        patch(part, EmulatedForward, emulated=emulated)


def _finish(model: Any, recipe: _Recipe, done: _Applied, *, cuda_graphs: bool) -> ParallelModel:
    """The parallelized model, as training uses it."""
    config, parallel_dims, anatomy = recipe.config, recipe.parallel_dims, recipe.anatomy
    parameters, modules, pp = done.parameters, done.modules, parallel_dims.mesh.pp
    # DDP reduces all gradients over the replicas, FSDP those of the parameters it shards. Neither reduces the gradients
    # of replicated pipeline stages: `Gradients` does.
    wrapped = pp == 1 and not recipe.fully_shard
    tied = {f"{anatomy.embedding}.weight"} if pp > 1 and anatomy.tied else set()
    placement = Placement(
        parallel_dims, recipe.shapes, done.splits, tied_across_stages=frozenset(tied & parameters.keys())
    )
    gradients = Gradients(
        parameters,
        placement,
        averages=[] if wrapped else [name for name, one in parameters.items() if not isinstance(one, DTensor)],
        in_place=isinstance(modules[0], DistributedDataParallel),
    )
    return ParallelModel(
        modules=modules,
        runner=_runner(model, recipe, done, gradients if cuda_graphs else None),
        parallel_dims=parallel_dims,
        anatomy=anatomy,
        precision=recipe.precision,
        placement=placement,
        parameters=parameters,
        buffers={
            name: one
            for stage in done.stages
            for name, one in kept_buffers(stage.model).items()
            if name in recipe.shapes
        },
        gradients=gradients,
        copies=[copies for module in modules for copies in module.modules() if isinstance(copies, ComputeCopies)],
        sequence_length=config.data.max_length if pp > 1 or (recipe.compiled and packs(config)) else None,
        sequence_multiple=sequence_multiple(config, compiled=recipe.compiled),
        notes=list(_notes(model, recipe, done, cuda_graphs=cuda_graphs)),
    )


def _runner(model: Any, recipe: _Recipe, done: _Applied, captured: Gradients | None) -> Runner:
    """`captured`: the gradients that CUDA graphs write; None: there are no graphs."""
    config, mesh, device = recipe.config, recipe.parallel_dims.mesh, recipe.parallel_dims.device
    prepare = preparation(done.sequence, device, fill=mesh.tp > 1 or mesh.pp > 1)
    if captured is not None:
        accumulates, must = recipe.grad_accum_steps > 1, config.train.cuda_graphs is True
        return GraphRunner(done.modules[0], prepare, captured, device, accumulates=accumulates, must=must)
    if mesh.pp == 1:
        keeps_weights = reshards_after_forward(config.parallel, recipe.strategy) is False
        return MicroBatchRunner(done.modules[0], prepare, keeps_weights=keeps_weights)
    return make_pipeline(
        [(stage.index, module) for stage, module in zip(done.stages, done.modules, strict=True)],
        config,
        recipe.parallel_dims,
        prepare=prepare,
        micro_batch=recipe.micro_batch,
        grad_accum_steps=recipe.grad_accum_steps,
        hidden_size=model.config.get_text_config().hidden_size,
        sums=len(recipe.objective.sums),
        dtype=recipe.precision.stream,
    )


def _notes(model: Any, recipe: _Recipe, done: _Applied, *, cuda_graphs: bool) -> Iterator[str]:
    """For the user: options that have no effect or only a partial one."""
    config, name = recipe.config, type(model).__name__
    if config.train.precision == "fp8":
        yield from float8_notes(name, [block for stage in done.stages for block in stage.blocks])
    if config.train.loss_impl in ("chunked", "fused") and recipe.loss == "plain":
        chosen = config.train.loss_impl
        yield f"train.loss_impl {chosen} has no effect: the lm_head of {name} is not a single linear layer."
    if config.train.cuda_graphs is True and not cuda_graphs:
        yield (
            "train.cuda_graphs true has no effect: it needs a single GPU, compiled blocks, and neither weights, "
            "optimizer state nor activations in host memory."
        )
    if config.train.recompute == "cheap" and recipe.backend is None:
        yield "train.recompute cheap has no effect: it is a choice of the compiler, and blocks are not compiled here."
    if config.train.recompute == "offload" and recipe.parallel_dims.device.type == "cpu":
        yield "train.recompute offload is the same as full: activations on a CPU are in host memory already."
    if config.model.attention == "flex" and not recipe.tiles:
        yield (
            f"model.attention flex has no effect: it needs CUDA, compiled blocks, and a model with a head dimension of "
            f"at least {NARROWEST} and no dropout in its attention; {name} is trained with sdpa or eager attention."
        )
    attention = _attention(model, recipe, documents=has_documents(config))
    if (warning := attention.warning(config.data.max_length)) is not None:
        yield warning
