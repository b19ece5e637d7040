"""Tensors of which each rank has its rows: as DeepSpeed's engine gets them, and as they go to and from checkpoints.

A model that ZeRO-3 will shard is materialized so, and made whole parameter by parameter: no rank ever has all of it.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shoal.models.slots import parameter_slots
from shoal.models.tensor_slices import local_tensor, placed_like
from shoal.parallel.collectives import all_gather_single


def own_rows(shape: tuple[int, ...], mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's rows of a tensor."""
    size, rank = math.ceil(shape[0] / mesh.size()), mesh.get_local_rank()
    return min(size * rank, shape[0]), min(size * (rank + 1), shape[0])


def place_rows(rows: Tensor, shape: tuple[int, ...], mesh: DeviceMesh) -> Tensor:
    """This rank's `rows` as a shard of a tensor of this shape."""
    return placed_like(rows, _on_meta(shape, len(rows), mesh))


def gather_rows(rows: Tensor, device: torch.device) -> Tensor:
    """The whole tensor on `device`, from the rows of all ranks, which all call it."""
    if not isinstance(rows, DTensor):
        return rows.to(device)
    mesh, shape, local = rows.device_mesh, tuple(rows.shape), local_tensor(rows).to(device)
    size = math.ceil(shape[0] / mesh.size())
    mine = local.new_zeros((size, *shape[1:]))
    mine[: len(local)] = local
    everyone = local.new_empty((size * mesh.size(), *shape[1:]))
    all_gather_single(everyone, mine, group=mesh.get_group())
    return everyone[: shape[0]]


def shard_rows(model: nn.Module, mesh: DeviceMesh) -> None:
    """Replace the parameters of a model on meta by this rank's rows of them."""
    for parameter, slots in parameter_slots(model.modules()).items():
        if parameter.dim():
            shape = tuple(parameter.shape)
            begin, end = own_rows(shape, mesh)
            _put(slots, nn.Parameter(_on_meta(shape, end - begin, mesh), requires_grad=parameter.requires_grad))


def whole_parameters(
    model: nn.Module,
    parameters: dict[str, nn.Parameter],
    *,
    device: torch.device,
    dtype: torch.dtype,
    partition: Callable[[nn.Parameter], None],
) -> dict[nn.Parameter, nn.Parameter]:
    """Replace rows by whole parameters on `device`, in `dtype`, one after the other, in the model and in `parameters`.
    `partition` is called with each, and shards it in place. Returns the new parameter of each old one."""
    slots = parameter_slots(model.modules())
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in parameters.items():
        if parameter not in replaced:
            whole = gather_rows(parameter.detach(), device).to(dtype)
            replaced[parameter] = nn.Parameter(whole, requires_grad=parameter.requires_grad)
            del whole
            _put(slots[parameter], replaced[parameter])
            partition(replaced[parameter])
        parameters[name] = replaced[parameter]
    return replaced


def _put(slots: list[tuple[nn.Module, str]], parameter: nn.Parameter) -> None:
    for module, name in slots:
        module._parameters[name] = parameter


def _on_meta(shape: tuple[int, ...], rows: int, mesh: DeviceMesh) -> DTensor:
    meta = torch.empty(shape, device="meta")
    return DTensor.from_local(meta[:rows], mesh, [Shard(0)], run_check=False, shape=meta.shape, stride=meta.stride())
