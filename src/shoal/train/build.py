"""Build the parallelized model and its optimizer. Used by training and by `shoal bench trace`."""

import torch

from shoal.catalogue.strategies import find_strategy
from shoal.models.prepare import PreparedModel
from shoal.objectives import Objective
from shoal.optim.offload import find_store
from shoal.optim.optimizer import NamedOptimizer, make_optimizer
from shoal.optim.zero1 import Partition
from shoal.parallel.apply import parallelize
from shoal.parallel.model import ParallelModel
from shoal.parallel.ranks import Ranks
from shoal.plan.resolved import ResolvedRun
from shoal.plan.speed import replays_graphs


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
    partitions = find_strategy(resolved.strategy).partitions_update
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


def keep_low_precision_gradients(model: ParallelModel, optimizer: NamedOptimizer, resolved: ResolvedRun) -> None:
    """Keep gradients in low precision where nothing accumulates into them: one rank, one micro-batch per step."""
    if optimizer.takes_factor and resolved.world_size == 1 and resolved.grad_accum_steps == 1:
        for copies in model.copies:
            copies.keep_low_precision_gradients()
