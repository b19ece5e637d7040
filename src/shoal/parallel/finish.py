"""From the stages of this rank to the model that training uses: gradients, the runner of micro-batches, and notes."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shoal.catalogue.attention import NARROWEST
from shoal.models.buffers import kept_buffers
from shoal.models.tensor_slices import Split
from shoal.parallel.compile import sequence_multiple
from shoal.parallel.context import SequenceShard, preparation
from shoal.parallel.cuda_graphs import GraphRunner
from shoal.parallel.float8 import float8_notes
from shoal.parallel.gradients import Gradients
from shoal.parallel.micro_batches import MicroBatchRunner
from shoal.parallel.model import ParallelModel, Runner
from shoal.parallel.pipeline import make_pipeline
from shoal.parallel.placement import Placement
from shoal.parallel.precision import ComputeCopies
from shoal.parallel.recipe import Recipe, attention_in
from shoal.parallel.shard import reshards_after_forward
from shoal.parallel.stages import StageModel
from shoal.plan.from_config import has_documents, packs
from shoal.plan.unintended import NOT_COMPILED


@dataclass
class Applied:
    """What has been done to the stages of this rank."""

    stages: list[StageModel]
    modules: list[nn.Module] = field(default_factory=list)  # with the loss and all wrappers
    splits: dict[str, Split] = field(default_factory=dict)
    sequence: SequenceShard | None = None
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)


def finish(model: Any, recipe: Recipe, done: Applied, *, cuda_graphs: bool) -> ParallelModel:
    """The parallelized model, as training uses it."""
    config, parallel_dims, anatomy = recipe.config, recipe.parallel_dims, recipe.anatomy
    parameters, modules, pp = done.parameters, done.modules, parallel_dims.mesh.pp
    # DDP reduces all gradients over the replicas, FSDP those of the parameters it shards. Neither reduces the gradients
    # of replicated pipeline stages, nor those that graphs write: `Gradients` does.
    wrapped = pp == 1 and not recipe.fully_shard and not cuda_graphs
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


def _runner(model: Any, recipe: Recipe, done: Applied, captured: Gradients | None) -> Runner:
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


def _notes(model: Any, recipe: Recipe, done: Applied, *, cuda_graphs: bool) -> Iterator[str]:
    """For the user: options that have no effect or only a partial one."""
    config, name = recipe.config, type(model).__name__
    if config.train.precision == "fp8":
        yield from float8_notes(name, [block for stage in done.stages for block in stage.blocks])
    if config.train.loss_impl in ("chunked", "fused") and recipe.loss == "plain":
        chosen = config.train.loss_impl
        yield f"train.loss_impl {chosen} has no effect: the lm_head of {name} is not a single linear layer."
    if config.train.cuda_graphs is True and not cuda_graphs:
        yield (
            "train.cuda_graphs true has no effect: it needs a single GPU, or ddp with gradients in fp32, compiled "
            "blocks, and neither weights, optimizer state nor activations in host memory."
        )
    if config.train.recompute == "cheap" and recipe.backend is None:
        yield NOT_COMPILED
    if config.train.recompute == "offload" and recipe.parallel_dims.device.type == "cpu":
        yield "train.recompute offload is the same as full: activations on a CPU are in host memory already."
    if config.model.attention == "flex" and not recipe.tiles:
        yield (
            f"model.attention flex has no effect: it needs CUDA, compiled blocks, and a model with a head dimension of "
            f"at least {NARROWEST} and no dropout in its attention; {name} is trained with sdpa or eager attention."
        )
    attention = attention_in(model, recipe, documents=has_documents(config))
    if (warning := attention.warning(config.data.max_length)) is not None:
        yield warning
