"""What is decided about a model before it is changed: precision, loss, compiler, attention."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.catalogue.attention import Attention
from shoal.catalogue.strategies import find_strategy
from shoal.config.engine import uses_deepspeed, zero_stage
from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.models.anatomy import Anatomy
from shoal.models.attention import attention_of, skips_tiles
from shoal.models.buffers import kept_buffers
from shoal.models.loss import LossFactory, choose_loss
from shoal.models.prepare import PreparedModel
from shoal.parallel.compile import compile_backend
from shoal.parallel.float8 import uses_float8_head
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.precision import Precision, read_precision


@dataclass(frozen=True)
class Recipe:
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


def read_recipe(
    prepared: PreparedModel,
    config: Config,
    objective: LossFactory,
    strategy: str,
    parallel_dims: ParallelDims,
    micro_batch: int,
    grad_accum_steps: int,
) -> Recipe:
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
    return Recipe(
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


def attention_in(model: Any, recipe: Recipe, *, documents: bool) -> Attention:
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
