"""Any nn.Module under DDP, ZeRO or FSDP2, with mixed precision, activation checkpointing and compile: in place, so that
the user's object stays the model that is called.

The order is that of `parallel.apply`, on a model that has values: broadcast → precision → activation checkpointing →
compile → FSDP, or the device and DDP.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shoal.catalogue.strategies import find_strategy
from shoal.config.mesh import Mesh
from shoal.config.schema import Config, WrapConfig
from shoal.mistakes import UserMistake
from shoal.models.anatomy import find_blocks
from shoal.models.buffers import kept_buffers
from shoal.models.emulate import EmulatedForward
from shoal.parallel.compile import compile_backend, compile_blocks
from shoal.parallel.gradients import Gradients
from shoal.parallel.model import TrainedModel
from shoal.parallel.parallel_dims import ParallelDims
from shoal.parallel.patch import patch
from shoal.parallel.placement import Placement
from shoal.parallel.precision import ComputeCopies, Precision, read_precision
from shoal.parallel.ranks import Ranks
from shoal.parallel.recompute import recompute_blocks
from shoal.parallel.shard import replicate, reshards_after_forward, shard_fully
from shoal.parallel.units import Units, blocks_of_classes, check_recomputed, choose_any_units

# DDP's sentence about parameters without a gradient begins so.
UNUSED = "Expected to have finished reduction in the prior iteration"


def check_model(model: Any) -> None:
    """A UserMistake unless `model` is one module."""
    if isinstance(model, nn.Module):
        return
    several = isinstance(model, tuple | list | dict)
    instead = "; make several networks parts of one module, as examples/loops/gan.py does" if several else ""
    raise UserMistake(f"run.prepare takes a torch nn.Module first, not a {type(model).__name__}{instead}.")


def check_custom(model: nn.Module, config: Config) -> None:
    """A UserMistake unless `model` can be parallelized as the config says."""
    wrappers = (DistributedDataParallel, DataParallel, FSDPModule, ComputeCopies)
    wrapped = next((one for one in model.modules() if isinstance(one, wrappers)), None)
    if wrapped is not None or isinstance(model, _Routed):
        by = "run.prepare" if wrapped is None else type(wrapped).__name__
        raise UserMistake(f"The model is already wrapped by {by}; give run.prepare the plain model, once.")
    if any(one.is_meta for one in model.parameters()):
        raise UserMistake("The model is on the meta device, without values; build it on the CPU.")
    if not any(one.requires_grad for one in model.parameters()):
        raise UserMistake("The model has no parameter that is trained (requires_grad).")
    if config.train.recompute != "none" and not _blocks(model, config):
        raise UserMistake(
            f"train.recompute needs the blocks of {type(model).__name__}, which has no nn.ModuleList of identical "
            "layers; name their class: parallel.wrap {classes: [NAME]}."
        )
    if config.parallel.engine != "native":
        raise UserMistake(f"parallel.engine {config.parallel.engine} is for shoal train; use native in a custom loop.")
    if config.train.precision == "fp8":
        raise UserMistake("train.precision fp8 is for the blocks of language models; use bf16-mixed.")


def parallelize_custom(
    model: nn.Module,
    config: Config,
    *,
    strategy: str,
    mesh: Mesh,
    ranks: Ranks,
    emulated: frozenset[torch.dtype] = frozenset(),
) -> TrainedModel:
    """Parallelize `model`, which `check_custom` has checked, over `mesh`. In place: it is called as before."""
    parallel, train = config.parallel, config.train
    parallel_dims = ParallelDims(mesh, ranks)
    if parallel_dims.gradient_ranks > 1:
        _ = parallel_dims.replicas  # creating a group is collective
    precision = read_precision(train.precision, train.reduce_dtype)
    fully_shard = find_strategy(strategy, parallel.sharding).fully_shard
    _broadcast(model, ranks)
    model.to(precision.weights)
    shapes = {name: tuple(one.shape) for name, one in {**dict(model.named_parameters()), **kept_buffers(model)}.items()}
    blocks = _blocks(model, config)
    units = choose_any_units(model, parallel.wrap) if fully_shard else []
    check_recomputed(units, blocks, train.recompute)
    if precision.compute != torch.float32:
        patch(model, _Cast, precision=precision, device_type=ranks.device.type)
    if precision.compute in emulated:
        for part in (model, *(blocks if train.recompute not in ("none", "cheap") else [])):
            patch(part, EmulatedForward, emulated=emulated)
    recompute_blocks(blocks, train.recompute)
    backend = compile_backend(train.compile, ranks.device)
    if backend is not None and (blocks or train.compile != "auto"):
        compile_blocks(blocks or [model], backend, keeps_all=train.recompute == "none")
    module: nn.Module = model
    if fully_shard:
        # Explicit prefetching assumes that units run in the order in which they are registered.
        prefetch = parallel.prefetch if "prefetch" in parallel.model_fields_set else 0
        shard_fully(
            model,
            Units([], units, []),
            parallel_dims.sharding,
            precision,
            reshard=reshards_after_forward(parallel, strategy),
            prefetch=prefetch,
            offload=parallel.offload == "cpu",
        )
        for tensor in (*model.parameters(), *model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(ranks.device)
    else:
        model.to(ranks.device)
    parameters = dict(model.named_parameters())
    if not fully_shard:
        patch(model, _Routed)
        if precision.mixed:
            module = ComputeCopies(module, precision, [[block] for block in blocks])
        if parallel_dims.gradient_ranks > 1:
            module = replicate(module, parallel_dims.replicas, precision, ranks.device, parallel.compress)
        _routes[model] = _Route(module)
    placement = Placement(parallel_dims, shapes)
    return TrainedModel(
        modules=[module],
        parallel_dims=parallel_dims,
        precision=precision,
        placement=placement,
        parameters=parameters,
        buffers=kept_buffers(model),
        gradients=Gradients(
            parameters,
            placement,
            averages=[name for name, one in parameters.items() if not isinstance(one, DTensor)] if fully_shard else [],
            in_place=isinstance(module, DistributedDataParallel),
        ),
        copies=[one for one in module.modules() if isinstance(one, ComputeCopies)],
        notes=_notes(model, config, ranks),
    )


def _blocks(model: nn.Module, config: Config) -> list[nn.Module]:
    """What is recomputed and compiled: the classes of `parallel.wrap`, or else the list of identical layers."""
    wrap = config.parallel.wrap
    if isinstance(wrap, WrapConfig) and wrap.classes:
        return blocks_of_classes(model, wrap.classes)
    return [model.get_submodule(name) for name in find_blocks(model)]


def _broadcast(model: nn.Module, ranks: Ranks) -> None:
    """Rank 0's parameters and buffers, on every rank: a script may have initialized them differently."""
    if ranks.world_size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            held = tensor.detach().contiguous()
            dist.broadcast(held, 0)
            tensor.data.copy_(held)


def _notes(model: nn.Module, config: Config, ranks: Ranks) -> list[str]:
    found = []
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if any(isinstance(one, batch_norms) for one in model.modules()):
        found.append(
            "batch normalization computes its statistics over each micro-batch, so results depend on train.micro_batch "
            "and on the number of devices; group or layer normalization does not."
        )
    if config.train.recompute == "offload" and ranks.device.type == "cpu":
        found.append("train.recompute offload is the same as full: activations on a CPU are in host memory already.")
    return found


class _Cast:
    """Mixed precision: matmuls in low precision, outputs in fp32, as the loss needs them."""

    precision: Precision
    device_type: str

    def forward(self, *inputs: Any, **named: Any) -> Any:
        precision = self.precision
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        if precision.autocast is not None:
            # Matrices are cast once per step: the cache would hold the same again.
            with torch.autocast(self.device_type, precision.compute, cache_enabled=False):
                found = forward(*inputs, **named)
        else:
            low = precision.compute
            found = forward(*_cast(inputs, low), **_cast(named, low))
        return _cast(found, torch.float32)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors inside tuples, lists and mappings, cast."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(one, dtype) for one in value))
    if isinstance(value, tuple | list):
        return type(value)(_cast(one, dtype) for one in value)
    if type(value) is dict:
        return {key: _cast(one, dtype) for key, one in value.items()}
    if isinstance(value, dict):  # the outputs of transformers, whose items are attributes too
        for key, one in list(value.items()):
            value[key] = _cast(one, dtype)
    return value


class _Route:
    """How a call of the model reaches it: through DDP and the low-precision copies."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)  # the run holds it; it holds the model
        self.inside = False


_routes: "weakref.WeakKeyDictionary[nn.Module, _Route]" = weakref.WeakKeyDictionary()


class _Routed:
    """A model whose call goes through its wrappers. A copy of it (an exponential moving average) has none."""

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        call: Callable[..., Any] = super().__call__  # type: ignore[misc]
        route = _routes.get(self)  # type: ignore[call-overload]
        module = None if route is None or route.inside else route.module()
        if route is None or module is None or module is self:
            return call(*inputs, **named)
        route.inside = True
        try:
            return module(*inputs, **named)
        except RuntimeError as error:
            if UNUSED in str(error):
                raise UserMistake(
                    "Some trained parameters of the model had no gradient in the last step, which DDP does not "
                    "support; freeze them (requires_grad_(False)), or use parallel.strategy fsdp."
                ) from None
            raise
        finally:
            route.inside = False
