"""Apply every parallelism and training technique to a model, in the one order that works.

Pipeline stages → tensor parallelism → context parallelism → float8 or NF4 → adapters → activation checkpointing →
compile → FSDP and weights, or weights and DDP. The model stays on the meta device until its weights are materialized,
so that a rank allocates memory for its own shard only.
"""

import torch
from torch import nn

from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.models.emulate import EmulatedForward
from shoal.models.loss import LossFactory
from shoal.models.peft_config import adapter_folder
from shoal.models.prepare import PreparedModel
from shoal.models.tensor_slices import Split
from shoal.models.weights import Weights, materialize
from shoal.parallel.adapters import use_adapters, use_quantized
from shoal.parallel.compile import compile_blocks
from shoal.parallel.context import split_sequence
from shoal.parallel.finish import Applied, finish
from shoal.parallel.float8 import use_float8, uses_float8_head
from shoal.parallel.model import ParallelModel
from shoal.parallel.packed import pack_weights, packs_weights
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.patch import patch
from shoal.parallel.pipeline import Stage
from shoal.parallel.precision import cast_norm_outputs
from shoal.parallel.ranks import Ranks
from shoal.parallel.recipe import Recipe, attention_in, read_recipe
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.shard import replicate_stage, shard_stage
from shoal.parallel.stages import StageModel, stages_of_rank
from shoal.parallel.tensor import VocabularyShard, split_tensors
from shoal.parallel.zero_rows import shard_rows


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
    recipe = read_recipe(
        prepared, config, objective, strategy, ParallelDims(mesh, ranks), micro_batch, grad_accum_steps
    )
    parallel_dims, precision, backend = recipe.parallel_dims, recipe.precision, recipe.backend
    adapted = prepared.adapters is not None
    done = Applied(stages_of_rank(model, recipe.anatomy, config.parallel.pp_schedule, parallel_dims))
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
        packed = pack_weights(stage.model, stage.blocks) if packs_weights(recipe) else []
        rank = None if config.adapter.kind == "none" else config.adapter.rank
        recompute_blocks(stage.blocks, config.train.recompute, adapter_rank=rank)
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
            module = replicate_stage(
                module, stage, config.parallel, parallel_dims, precision, packed, cuda_graphs=cuda_graphs
            )
        done.modules.append(module)
    return finish(model, recipe, done, cuda_graphs=cuda_graphs)


def _weights(prepared: PreparedModel, config: Config, *, resumes: bool) -> Weights:
    start_from = config.adapter.from_ if not resumes and prepared.adapters is not None else None
    adapter = None if start_from is None else adapter_folder(start_from)
    return Weights(prepared.folder, config.seed, prepared.new_rows, adapter)


def _with_loss(stage: StageModel, recipe: Recipe, splits: dict[str, Split]) -> nn.Module:
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
    inner.windows_in_tiles = attention_in(stage.model, recipe, documents=False).path == "tiles"
    return inner if stage.count == 1 else Stage(inner, is_first=stage.is_first, is_last=stage.is_last)


def _emulate_matmuls(
    module: nn.Module, blocks: list[nn.Module], recipe: Recipe, emulated: frozenset[torch.dtype]
) -> None:
    # A compiled block is traced once, inside the whole module, and its graph contains what it recomputes.
    is_recomputed = recipe.config.train.recompute not in ("none", "cheap") and recipe.backend is None
    for part in (module, *(blocks if is_recomputed else [])):
        patch(part, EmulatedForward, emulated=emulated)
