"""Build the parallelized model and its optimizer. Used by training and by `shoal bench trace`."""

from pathlib import Path
from typing import Any

import torch

from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.optim.offload import find_store
from shoal.optim.optimizer import NamedOptimizer, make_optimizer
from shoal.optim.zero1 import Partition
from shoal.parallel.apply import parallelize
from shoal.parallel.model import ParallelModel
from shoal.parallel.ranks import Ranks
from shoal.plan.choose import Chosen


def build(
    built: Any,
    config: Config,
    chosen: Chosen,
    mesh: Mesh,
    ranks: Ranks,
    *,
    folder: Path | None,
    values: bool,
    emulated: frozenset[torch.dtype] = frozenset(),
) -> tuple[ParallelModel, NamedOptimizer]:
    """Parallelize `built`, a model on the meta device, as `chosen` says. `folder` and `values` say where its weights
    come from, `emulated` which dtypes have their matmuls computed in fp32: see `parallelize`."""
    model = parallelize(
        built,
        config,
        strategy=chosen.strategy,
        mesh=mesh,
        ranks=ranks,
        micro_batch=chosen.micro_batch,
        grad_accum_steps=chosen.grad_accum_steps,
        folder=folder,
        values=values,
        emulated=emulated,
    )
    optimizer = make_optimizer(
        model.parameters,
        config.train,
        model.anatomy,
        placement=model.placement,
        partition=Partition(model.parameters, model.parallel_dims.replicas) if chosen.strategy == "zero1" else None,
        store=find_store(config.parallel.offload),
        copies=model.low_precision,
        emulated=emulated,
    )
    return model, optimizer


def keep_low_precision_gradients(model: ParallelModel, optimizer: NamedOptimizer, chosen: Chosen) -> None:
    """Keep gradients in low precision where nothing accumulates into them: one rank, one micro-batch per step."""
    if optimizer.takes_factor and chosen.world_size == 1 and chosen.grad_accum_steps == 1:
        for copies in model.copies:
            copies.keep_low_precision_gradients()
