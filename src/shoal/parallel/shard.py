"""Data parallelism: gradients averaged over replicas (DDP), or everything sharded (FSDP2)."""

from inspect import signature

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.parallel.precision import Precision

COMPRESSION = {torch.bfloat16: default_hooks.bf16_compress_hook, torch.float16: default_hooks.fp16_compress_hook}
# Buffers are constants, the same everywhere. torch 2.13 renames the option that leaves them alone.
BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel.__init__).parameters
)


def replicate(module: nn.Module, precision: Precision, device: torch.device) -> DistributedDataParallel:
    """Average the gradients of `module`, which must already have its values, the same on all ranks."""
    wrapped = DistributedDataParallel(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        init_sync=False,
        **{BUFFERS: False},  # type: ignore[arg-type]
    )
    if precision.mixed and precision.reduce in COMPRESSION:
        wrapped.register_comm_hook(None, COMPRESSION[precision.reduce])
    return wrapped


def shard_fully(
    module: nn.Module,
    blocks: list[nn.Module],
    mesh: DeviceMesh,
    precision: Precision,
    *,
    reshard: bool,
    prefetch: int,
) -> None:
    """Shard each block, and what is left as the root's own group, over `mesh`. In place; works on meta."""
    policy = MixedPrecisionPolicy(
        param_dtype=precision.compute if precision.mixed else None,
        reduce_dtype=precision.reduce if precision.mixed else None,
    )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    # Embedding, norm and head stay in the root's group: it is gathered once for the whole pass.
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    units: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    if prefetch > 0:
        for index, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[index + 1 : index + 1 + prefetch])
            unit.set_modules_to_backward_prefetch(units[max(0, index - prefetch) : index][::-1])
