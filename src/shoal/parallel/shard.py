"""Data parallelism: replicated (DDP) or sharded (FSDP2)."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.catalogue.strategies import find_strategy
from shoal.config.schema import ParallelConfig
from shoal.models.loss import LanguageModel
from shoal.models.nf4_layers import nested_parameters
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.pipeline import Stage
from shoal.parallel.precision import DTYPES, ComputeCopies, Packed, Precision
from shoal.parallel.stages import StageModel
from shoal.parallel.units import Units, choose_units

# PowerSGD all-reduces two matrices of this rank instead of a gradient, after some steps without compression.
POWER_RANK, POWER_START = 4, 10
# Buffers are constants and need no synchronization. torch 2.13 renames the option that disables it.
BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


def shard_stage(
    module: nn.Module,
    stage: StageModel,
    parallel: ParallelConfig,
    strategy: str,
    parallel_dims: ParallelDims,
    precision: Precision,
) -> None:
    """Shard the module of a stage, which is on meta, in place."""
    language = module.inner if isinstance(module, Stage) else module
    assert isinstance(language, LanguageModel)
    shard_fully(
        module,
        choose_units(language, parallel.wrap, part=stage.count > 1),
        parallel_dims.sharding,
        precision,
        reshard=reshards_after_forward(parallel, strategy),
        prefetch=parallel.prefetch,
        offload=parallel.offload == "cpu",
    )


def replicate_stage(
    module: nn.Module,
    stage: StageModel,
    parallel: ParallelConfig,
    parallel_dims: ParallelDims,
    precision: Precision,
    packed: Sequence[Packed],
    *,
    cuda_graphs: bool,
) -> nn.Module:
    """Wrap the module of a stage, which is materialized, in what its precision and its replicas need."""
    if precision.mixed:
        units = [[block] for block in stage.blocks]
        if last := stage.final_norm:
            # A chunked loss uses the head's weight without calling the head, but always after the final norm.
            units.append([*last, stage.model.get_submodule(stage.anatomy.head)])
        module = ComputeCopies(module, precision, units, packed)
    # DDP would reduce a stage's gradients in every micro-batch of the schedule, and its reducer cannot be captured:
    # `Gradients` does it once, at the end. DeepSpeed's engine reduces them itself.
    reduces = parallel.engine == "native" and parallel_dims.mesh.pp == 1 and not cuda_graphs
    if reduces and parallel_dims.gradient_ranks > 1:
        module = replicate(module, parallel_dims.replicas, precision, parallel_dims.device, parallel.compress)
    return module


def reshards_after_forward(parallel: ParallelConfig, strategy: str) -> bool | int:
    """FSDP's `reshard_after_forward`: whether weights are freed after the forward pass, or the size to reshard to."""
    if parallel.pp > 1:  # a stage would all-gather its weights again for every micro-batch of the schedule
        return False
    if find_strategy(strategy, parallel.sharding).keeps_weights:
        return False
    return True if parallel.reshard == "auto" else parallel.reshard


def replicate(
    module: nn.Module, mesh: DeviceMesh, precision: Precision, device: torch.device, compress: str
) -> DistributedDataParallel:
    """Wrap `module` in DDP. It must be materialized, with the same values on all ranks of `mesh`."""
    group = mesh.get_group()
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        process_group=group,
        gradient_as_bucket_view=True,
        init_sync=False,
        **{BUFFERS: False},  # type: ignore[arg-type]
    )
    if compress == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            group, matrix_approximation_rank=POWER_RANK, start_powerSGD_iter=POWER_START
        )
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif compress != "none":
        wrapped.register_comm_hook(group, _low_precision_all_reduce(DTYPES[compress]))
    elif precision.mixed and precision.reduce != torch.float32:
        wrapped.register_comm_hook(group, _low_precision_all_reduce(precision.reduce))
    return wrapped


def _low_precision_all_reduce(dtype: torch.dtype) -> Callable[..., Any]:
    """A DDP communication hook that averages gradients in `dtype`. torch's bf16 hook requires NCCL."""

    def average(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        cast = bucket.buffer().to(dtype).div_(group.size())
        work = dist.all_reduce(cast, group=group, async_op=True)
        assert work is not None

        def restore(done: torch.futures.Future[list[Tensor]]) -> Any:
            return bucket.buffer().copy_(done.value()[0])

        averaged: torch.futures.Future[Tensor] = work.get_future().then(restore)
        return averaged

    return average


def shard_fully(
    module: nn.Module,
    units: Units,
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard: bool | int,
    prefetch: int,
    offload: bool,
) -> None:
    """Apply `fully_shard` to each unit and to the root, over `mesh`. In place; works on meta."""
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.mixed else None,
        reduce_dtype=precision.reduce if precision.mixed else None,
        cast_forward_inputs=False,  # inputs already have the right dtype
    )
    # Pinning memory needs an accelerator.
    offload_policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    # Replicated vectors are at most a thousandth of a model. Their gradients are all-reduced after the last micro-batch
    # of a step.
    replicated = {one for one in module.parameters() if precision.is_replicated(one)} | nested_parameters(module)
    options: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": policy,
        "offload_policy": offload_policy,
        "ignored_params": replicated,
    }
    for unit in units.first:
        fully_shard(unit, reshard_after_forward=bool(reshard), **options)
        assert isinstance(unit, FSDPModule)
        unit.set_unshard_in_backward(False)  # the gradient of a lookup does not depend on the embedding weight
    for unit in reversed(units.blocks):  # nested units first
        fully_shard(unit, reshard_after_forward=reshard, **options)
    # The backward pass begins with the last unit: freeing its weights in between would gain nothing.
    for unit in units.last:
        fully_shard(unit, reshard_after_forward=False, **options)
    # The head is also a submodule of the model, so the root would manage its weight a second time.
    options["ignored_params"] = replicated.union(*(unit.parameters() for unit in units.last))
    fully_shard(module, reshard_after_forward=False, **options)
    _set_prefetch([*units.first, *units.blocks, *units.last], prefetch)


def _set_prefetch(units: list[nn.Module], prefetch: int) -> None:
    """Prefetch the next `prefetch` units in the forward pass, and the previous ones in the backward pass."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    if prefetch > 0:
        for index, one in enumerate(sharded):
            one.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + prefetch])
            one.set_modules_to_backward_prefetch(sharded[max(0, index - prefetch) : index][::-1])
