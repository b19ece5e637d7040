"""Build the parallelized model and its optimizer. Used by training and by `shoal bench trace`."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from shoal.catalogue.strategies import find_strategy
from shoal.config.engine import uses_deepspeed, zero_stage
from shoal.models.prepare import PreparedModel
from shoal.objectives import Objective
from shoal.optim.deepspeed import ZeroOptimizer, new_state, torch_optimizer
from shoal.optim.loss_scaler import LossScaler
from shoal.optim.offload import find_store
from shoal.optim.optimizer import NamedOptimizer, make_optimizer
from shoal.optim.zero1 import Partition
from shoal.parallel.apply import parallelize
from shoal.parallel.deepspeed import EngineModel, engine_settings, start_all_reduce, start_zero
from shoal.parallel.model import ParallelModel
from shoal.parallel.ranks import Ranks
from shoal.plan.resolved import ResolvedRun
from shoal.plan.speed.forecast import replays_graphs
from shoal.resilience.health import SpikeGuard
from shoal.train.engine_step import EngineStep
from shoal.train.step import TrainStep


def build(
    prepared: PreparedModel,
    resolved: ResolvedRun,
    ranks: Ranks,
    *,
    objective: Objective,
    values: bool,
    resumes: bool = False,
    emulated: frozenset[torch.dtype] = frozenset(),
) -> tuple[ParallelModel, NamedOptimizer]:
    """Parallelize the model as `resolved` says. Without `values` its weights stay uninitialized. `emulated`: dtypes
    whose matmuls are computed in fp32."""
    config = resolved.config
    model = parallelize(
        prepared,
        config,
        objective=objective,
        strategy=resolved.strategy,
        mesh=resolved.mesh,
        ranks=ranks,
        micro_batch=resolved.micro_batch,
        grad_accum_steps=resolved.grad_accum_steps,
        values=values,
        resumes=resumes,
        emulated=emulated,
        cuda_graphs=replays_graphs(resolved.run),
    )
    stage = zero_stage(resolved.strategy, config.parallel.sharding) if uses_deepspeed(config) else None
    if stage is not None:
        settings = engine_settings(
            config,
            stage,
            parameters=prepared.parameters,
            micro_batch=resolved.micro_batch,
            grad_accum_steps=resolved.grad_accum_steps,
        )
        if stage > 0:
            updates = torch_optimizer(model.parameters, config.train, device=ranks.device)
            sharded = start_zero(model, updates, settings, make_state=partial(new_state, updates), values=values)
            return sharded, ZeroOptimizer(sharded.zero)
        model = start_all_reduce(model, settings)
    partitions = stage is None and find_strategy(resolved.strategy).partitions_update
    optimizer = make_optimizer(
        model.parameters,
        config.train,
        model.anatomy,
        placement=model.placement,
        partition=Partition(model.parameters, model.parallel_dims.replicas) if partitions else None,
        store=find_store(config.parallel.offload),
        copies=model.low_precision,
        emulated=emulated,
        seed=config.seed,
    )
    return model, optimizer


def make_step(
    model: ParallelModel,
    optimizer: NamedOptimizer,
    scaler: LossScaler,
    *,
    clip: float | None,
    guard: SpikeGuard | None,
    total: Callable[[Tensor], Tensor],
) -> TrainStep:
    """The optimizer step: ours, or that of DeepSpeed's engine where it has the gradients."""
    kind = EngineStep if isinstance(model, EngineModel) else TrainStep
    return kind(model, optimizer, scaler, clip=clip, guard=guard, total=total)


def keep_low_precision_gradients(model: ParallelModel, optimizer: NamedOptimizer, resolved: ResolvedRun) -> None:
    """Keep gradients in low precision where nothing accumulates into them: one rank, one micro-batch per step."""
    if optimizer.own_kernels and resolved.world_size == 1 and resolved.grad_accum_steps == 1:
        for copies in model.copies:
            copies.keep_low_precision_gradients()
