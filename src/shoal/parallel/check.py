"""Whether a model can be parallelized as a run asks: before processes, memory or a run folder exist."""

from typing import Any

from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.strategies import find_strategy
from shoal.config.engine import uses_deepspeed
from shoal.config.mesh import Mesh
from shoal.config.schema import Config
from shoal.models.anatomy import read_anatomy, require_blocks
from shoal.parallel.adapters import check_adapters
from shoal.parallel.context import check_context_parallel
from shoal.parallel.deepspeed import check_deepspeed
from shoal.parallel.stages import check_pipeline
from shoal.parallel.tensor import check_tensor_parallel
from shoal.parallel.units import check_recomputed, choose_blocks

SHARD_INSTEAD = "use parallel.strategy fsdp with parallel.wrap {min_params: 10_000_000}, which needs none"


def check_parallel(model: Any, config: Config, *, strategy: str, mesh: Mesh, grad_accum_steps: int) -> None:
    """Raise a UserMistake unless `model`, on the meta device, can be parallelized so."""
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
        units = choose_blocks(model, anatomy, parallel.wrap)
        check_recomputed(units, anatomy.block_modules(model), train.recompute)
