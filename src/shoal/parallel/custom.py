"""Any nn.Module, or several, under DDP, ZeRO or FSDP2, with mixed precision, activation checkpointing and compile: in
place, so that the user's object stays the model that is called.

The order is that of `parallel.apply`, on a model that has values: broadcast → precision → activation checkpointing →
compile → FSDP, or the device and DDP.
"""

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
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
from shoal.parallel.collectives import broadcast_first
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


Value = TypeVar("Value")


def named_networks(model: Any) -> dict[str, nn.Module]:
    """The networks of a run by name. One module has none; several have the keys of a mapping, or their numbers."""
    if isinstance(model, nn.Module):
        return {"": model}
    if not isinstance(model, tuple | list | dict) or not model:
        raise UserMistake(
            f"run.prepare takes a torch nn.Module first, or a tuple or dict of them, not a {type(model).__name__}."
        )
    found = dict(model) if isinstance(model, dict) else {str(index): one for index, one in enumerate(model)}
    for name, one in found.items():
        if not isinstance(one, nn.Module):
            raise UserMistake(f"{name!r} of the networks is a {type(one).__name__}, not a torch nn.Module.")
        if isinstance(model, dict) and not (isinstance(name, str) and name.isidentifier()):
            raise UserMistake(f"{name!r} cannot be the name of a network; use letters, digits and underscores.")
    owners: dict[nn.Parameter, str] = {}
    for name, one in found.items():
        for parameter in one.parameters():
            if (other := owners.setdefault(parameter, name)) != name:
                raise UserMistake(
                    f"The networks {other!r} and {name!r} share a parameter; make them parts of one module, and give "
                    "that to run.prepare."
                )
    return found


def of_all(
    networks: Mapping[str, nn.Module], get: Callable[[nn.Module], Iterable[tuple[str, Value]]]
) -> dict[str, Value]:
    """What `get` finds in each network, by its name after that of the network."""
    return {f"{key}.{name}" if key else name: one for key, network in networks.items() for name, one in get(network)}


def check_custom(networks: Mapping[str, nn.Module], config: Config) -> None:
    """A UserMistake unless the `networks` can be parallelized as the config says."""
    wrappers = (DistributedDataParallel, DataParallel, FSDPModule, ComputeCopies)
    for model in networks.values():
        wrapped = next((one for one in model.modules() if isinstance(one, wrappers)), None)
        if wrapped is not None or isinstance(model, _Routed):
            by = "run.prepare" if wrapped is None else type(wrapped).__name__
            raise UserMistake(f"The model is already wrapped by {by}; give run.prepare the plain model, once.")
        if any(one.is_meta for one in model.parameters()):
            raise UserMistake("The model is on the meta device, without values; build it on the CPU.")
    if not any(one.requires_grad for model in networks.values() for one in model.parameters()):
        raise UserMistake("The model has no parameter that is trained (requires_grad).")
    if config.train.recompute != "none" and not any(_blocks(networks, config).values()):
        raise UserMistake(
            f"train.recompute needs the blocks of {_class_names(networks)}, which has no nn.ModuleList of identical "
            "layers; name their class: parallel.wrap {classes: [NAME]}."
        )
    if config.parallel.engine != "native":
        raise UserMistake(f"parallel.engine {config.parallel.engine} is for shoal train; use native in a custom loop.")
    if config.train.precision == "fp8":
        raise UserMistake("train.precision fp8 is for the blocks of language models; use bf16-mixed.")


def _class_names(networks: Mapping[str, nn.Module]) -> str:
    return " and ".join(type(one).__name__ for one in networks.values())


def parallelize_custom(
    networks: Mapping[str, nn.Module],
    config: Config,
    *,
    strategy: str,
    mesh: Mesh,
    ranks: Ranks,
    in_turns: bool = False,
    emulated: frozenset[torch.dtype] = frozenset(),
) -> TrainedModel:
    """Parallelize the networks, which `check_custom` has checked, over `mesh`. In place: they are called as before.

    `in_turns`: some backward passes are of a part of the parameters. DDP, which reduces all of them in each, is not
    used then; `Gradients` averages those that are updated.
    """
    parallel, train = config.parallel, config.train
    parallel_dims = ParallelDims(mesh, ranks)
    if parallel_dims.gradient_ranks > 1:
        _ = parallel_dims.replicas  # creating a group is collective
    precision = read_precision(train.precision, train.reduce_dtype)
    fully_shard = find_strategy(strategy, parallel.sharding).fully_shard
    every = networks.values()
    for model in every:
        _broadcast(model, ranks)
        model.to(precision.weights)
    saved = {**of_all(networks, nn.Module.named_parameters), **of_all(networks, _buffers)}
    shapes = {name: tuple(one.shape) for name, one in saved.items()}
    blocks = _blocks(networks, config)
    units = _units(networks, parallel.wrap) if fully_shard else {}
    for key in networks:
        check_recomputed(units.get(key, []), blocks[key], train.recompute)
    backend = compile_backend(train.compile, ranks.device)
    for key, model in networks.items():
        if precision.compute != torch.float32:
            patch(model, _Cast, precision=precision, device_type=ranks.device.type)
        if precision.compute in emulated:
            for part in (model, *(blocks[key] if train.recompute not in ("none", "cheap") else [])):
                patch(part, EmulatedForward, emulated=emulated)
        recompute_blocks(blocks[key], train.recompute)
        if backend is not None and (blocks[key] or train.compile != "auto"):
            compile_blocks(blocks[key] or [model], backend, keeps_all=train.recompute == "none")
        if fully_shard:
            patch(model, _KeepsGradients)
            _shard(model, units[key], config, strategy, parallel_dims, precision)
        else:
            model.to(ranks.device)
    parameters = of_all(networks, nn.Module.named_parameters)
    modules = list(every)
    if not fully_shard:
        group = None if in_turns or parallel_dims.gradient_ranks == 1 else parallel_dims.replicas
        modules = []
        for key, model in networks.items():
            patch(model, _Routed)
            module = ComputeCopies(model, precision, [[block] for block in blocks[key]]) if precision.mixed else model
            if group is not None:
                module = replicate(module, group, precision, ranks.device, parallel.compress)
            _routes[model] = _Route(module)
            modules.append(module)
    reduced = [name for name, one in parameters.items() if isinstance(one, DTensor)]
    if not fully_shard and not in_turns:
        reduced = list(parameters)  # by DDP, if there are several ranks
    placement = Placement(parallel_dims, shapes)
    return TrainedModel(
        modules=modules,
        parallel_dims=parallel_dims,
        precision=precision,
        placement=placement,
        parameters=parameters,
        buffers=of_all(networks, _buffers),
        gradients=Gradients(
            parameters,
            placement,
            averages=[name for name in parameters if name not in set(reduced)],
            in_place=any(isinstance(one, DistributedDataParallel) for one in modules),
        ),
        copies=[one for module in modules for one in module.modules() if isinstance(one, ComputeCopies)],
        notes=_notes(networks, config, ranks),
    )


def _shard(
    model: nn.Module,
    units: list[nn.Module],
    config: Config,
    strategy: str,
    parallel_dims: ParallelDims,
    precision: Precision,
) -> None:
    parallel = config.parallel
    shard_fully(
        model,
        Units([], units, []),
        parallel_dims.sharding,
        precision,
        reshard=reshards_after_forward(parallel, strategy),
        # Explicit prefetching assumes that units run in the order in which they are registered.
        prefetch=parallel.prefetch if "prefetch" in parallel.model_fields_set else 0,
        offload=parallel.offload == "cpu",
    )
    for tensor in (*model.parameters(), *model.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(parallel_dims.device)


def _buffers(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    return kept_buffers(model).items()


def _blocks(networks: Mapping[str, nn.Module], config: Config) -> dict[str, list[nn.Module]]:
    """What is recomputed and compiled: the classes of `parallel.wrap`, or else the list of identical layers."""
    wrap = config.parallel.wrap
    if isinstance(wrap, WrapConfig) and wrap.classes:
        return _of_classes(networks, wrap)
    return {key: [model.get_submodule(name) for name in find_blocks(model)] for key, model in networks.items()}


def _units(networks: Mapping[str, nn.Module], wrap: str | WrapConfig) -> dict[str, list[nn.Module]]:
    """What FSDP shards and gathers together."""
    if len(networks) == 1 or not isinstance(wrap, WrapConfig) or not wrap.classes:
        return {key: choose_any_units(model, wrap) for key, model in networks.items()}
    return _of_classes(networks, wrap)


def _of_classes(networks: Mapping[str, nn.Module], wrap: WrapConfig) -> dict[str, list[nn.Module]]:
    """The modules of the classes of `wrap` in each network; a class need not be in all of them."""
    whole = next(iter(networks.values())) if len(networks) == 1 else nn.ModuleList(networks.values())
    chosen = set(blocks_of_classes(whole, wrap.classes))
    return {key: [one for one in model.modules() if one in chosen] for key, model in networks.items()}


def _broadcast(model: nn.Module, ranks: Ranks) -> None:
    """Rank 0's parameters and buffers, on every rank: a script may have initialized them differently."""
    if ranks.world_size > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            broadcast_first(tensor)


def _notes(networks: Mapping[str, nn.Module], config: Config, ranks: Ranks) -> list[str]:
    found = []
    batch_norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if any(isinstance(one, batch_norms) for model in networks.values() for one in model.modules()):
        found.append(
            "batch normalization computes its statistics over each micro-batch, so results depend on train.micro_batch "
            "and on the number of devices; group or layer normalization does not. Evaluations and checkpoints have the "
            "running statistics of rank 0."
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


class _KeepsGradients:
    """`run.step` clears the gradients. In a loop that accumulates, a zero_grad that was left would discard some."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        return


class _Routed:
    """A model whose call goes through its wrappers. A copy of it (an exponential moving average) has none."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        if _routes.get(self) is None:  # type: ignore[call-overload] # a copy; else as in `_KeepsGradients`
            super().zero_grad(set_to_none)  # type: ignore[misc]

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
