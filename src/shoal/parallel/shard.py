"""Data parallelism: gradients averaged over replicas (DDP), or everything sharded (FSDP2)."""

from collections.abc import Callable
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

from shoal.parallel.precision import DTYPES, Precision
from shoal.parallel.units import Units

SHARDED = ("fsdp", "zero2", "zero3")  # the strategies that FSDP2 carries out
# PowerSGD sends two thin matrices of this rank instead of a gradient, after some steps that send it whole.
POWER_RANK, POWER_START = 4, 10
# Buffers are constants, the same everywhere. torch 2.13 renames the option that leaves them alone.
BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


def replicate(
    module: nn.Module, mesh: DeviceMesh, precision: Precision, device: torch.device, compress: str
) -> DistributedDataParallel:
    """Average the gradients of `module`, which must already have its values, the same on all ranks of `mesh`."""
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
        wrapped.register_comm_hook(group, _rounded(DTYPES[compress]))
    elif precision.mixed and precision.reduce != torch.float32:
        wrapped.register_comm_hook(group, _rounded(precision.reduce))
    return wrapped


def _rounded(dtype: torch.dtype) -> Callable[..., Any]:
    """A hook that averages gradients in a smaller type. torch's own for bf16 works with NCCL alone."""

    def average(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        small = bucket.buffer().to(dtype).div_(group.size())
        work = dist.all_reduce(small, group=group, async_op=True)
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
    """Shard each unit, and what is left as the root's own group, over `mesh`. In place; works on meta."""
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.mixed else None,
        reduce_dtype=precision.reduce if precision.mixed else None,
        cast_forward_inputs=False,  # a block's inputs are in the type that they should be in
    )
    # Pinned memory is the accelerator's; without one there is nothing to pin it for.
    place = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    # A unit is gathered in one type, and vectors are not rounded to that of matrices: they are left whole. They are a
    # thousandth of a model or less, and their gradients are averaged together after a step's passes.
    whole = {one for one in module.parameters() if precision.mixed and not precision.is_rounded(one)}
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": place, "ignored_params": whole}
    for unit in units.first:
        fully_shard(unit, reshard_after_forward=bool(reshard), **options)
        assert isinstance(unit, FSDPModule)
        unit.set_unshard_in_backward(False)  # the gradient of what was looked up does not depend on the table
    for unit in reversed(units.blocks):  # those inside others first
        fully_shard(unit, reshard_after_forward=reshard, **options)
    # The backward pass begins where the forward pass ends: nothing would be gained by letting go in between.
    for unit in units.last:
        fully_shard(unit, reshard_after_forward=False, **options)
    # The model has the head too, so the root would come upon it.
    options["ignored_params"] = whole.union(*(unit.parameters() for unit in units.last))
    fully_shard(module, reshard_after_forward=False, **options)
    _gather_ahead([*units.first, *units.blocks, *units.last], prefetch)


def _gather_ahead(units: list[nn.Module], prefetch: int) -> None:
    """Let each of `units` call for those after it in the forward pass, and for those before it in the backward pass."""
    sharded: list[FSDPModule] = [unit for unit in units if isinstance(unit, FSDPModule)]
    if prefetch > 0:
        for index, one in enumerate(sharded):
            one.set_modules_to_forward_prefetch(sharded[index + 1 : index + 1 + prefetch])
            one.set_modules_to_backward_prefetch(sharded[max(0, index - prefetch) : index][::-1])
