"""Random initial values, the same whatever the parallel layout: every rank draws each block in full, from a seed of its
own, and keeps its shard."""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.adapters import MAGNITUDE, UP, Factor, adapter_parameters, row_norms
from shoal.models.anatomy import Anatomy
from shoal.models.nf4_layers import STORED, is_quantized
from shoal.models.read_weights import fill_quantized_layer, whole_matrix_shape
from shoal.models.slots import parameter_slots
from shoal.models.tensor_slices import Split, Splits, TensorSlice, local_tensor, slice_mappings, whole_shape


def draw_weights(model: Any, anatomy: Anatomy, device: torch.device, seed: int, splits: Splits) -> None:
    """Initialize each block, then the other modules, as transformers does, from seeds that depend on names only."""
    names = {module: name for name, module in model.named_modules()}
    inside = {module for name in anatomy.blocks for module in model.get_submodule(name).modules()}
    split = {parameter: splits[name] for name, parameter in model.named_parameters() if name in splits}
    devices = [device] if device.type == "cuda" else []
    initialize = initializers(model)
    with torch.random.fork_rng(devices=devices):
        for name in anatomy.blocks:
            modules = _without_adapters(_children_first(model.get_submodule(name)))
            _reseed(seed, name, device)
            with _whole_parameters(modules, device, split):
                for module in modules:
                    initialize[module](module)
        # Each with a seed of its own: a pipeline stage has only some of them.
        outside = [module for module in _children_first(model) if module not in inside]
        for modules in _one_at_a_time(outside):
            with _whole_parameters(modules, device, split):
                for module in modules:
                    _reseed(seed, names[module], device)
                    initialize[module](module)


def draw_fresh(model: Any, names: Collection[str], device: torch.device, seed: int, splits: Splits) -> None:
    """Initialize the modules with these parameters, as `draw_weights` does."""
    wanted = {name.rpartition(".")[0] for name in names}
    split = {parameter: splits[name] for name, parameter in model.named_parameters() if name in splits}
    initialize = initializers(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        for name in sorted(wanted):
            module = model.get_submodule(name)
            with _whole_parameters([module], device, split):
                _reseed(seed, name, device)
                initialize[module](module)


def _one_at_a_time(modules: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Embedding and head by themselves unless they are tied, then all others: whole in fp32 they are large."""
    owners = Counter(parameter for module in modules for parameter in module._parameters.values())
    alone: list[nn.Module] = [
        module
        for module in modules
        if isinstance(module, nn.Linear | nn.Embedding)
        and all(owners[parameter] == 1 for parameter in module._parameters.values() if parameter is not None)
    ]
    yield from ([module] for module in alone)
    yield [module for module in modules if module not in alone]


def start_adapters(model: nn.Module, seed: int, splits: Splits) -> None:
    """The usual start of LoRA: `A` is drawn, `B` is zero, so that the model starts as its base. On the CPU, from seeds
    that depend on names only."""
    for name, parameter in adapter_parameters(model).items():
        child = name.split(".")[-2]
        if child == UP:
            local_tensor(parameter).zero_()
            continue
        if child == MAGNITUDE:
            layer: Any = model.get_submodule(name.rsplit(".", 2)[0])
            if not is_quantized(layer):
                # Sharded by rows like its matrix, which has whole rows: tensor parallelism does not support DoRA.
                local_tensor(parameter).copy_(row_norms(local_tensor(layer.weight)))
            continue
        with torch.random.fork_rng(devices=[]):
            _reseed(seed, name, torch.device("cpu"))
            drawn = torch.empty(whole_shape(parameter, splits.get(name)))
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
        for mapping in slice_mappings(parameter, splits.get(name)):
            local_tensor(parameter)[mapping.local.slices].copy_(drawn[mapping.whole.slices])


def initializers(model: Any) -> dict[nn.Module, Callable[[nn.Module], None]]:
    """The function that initializes each module: `_init_weights` of the innermost transformers model that holds it."""
    found: dict[nn.Module, Callable[[nn.Module], None]] = {}

    def visit(module: Any, outer: Callable[[nn.Module], None]) -> None:
        found[module] = getattr(module, "_init_weights", outer)
        for child in module.children():
            visit(child, found[module])

    visit(model, model._init_weights)
    return found


@contextmanager
def _whole_parameters(
    modules: list[nn.Module], device: torch.device, split: dict[nn.Parameter, Split]
) -> Iterator[None]:
    """Temporarily give the modules unsharded fp32 parameters, and copy this rank's shards back at the end."""
    quantized: list[Any] = [module for module in modules if is_quantized(module)]
    stored = {
        layer: {key: layer._parameters.pop(key) for key in STORED if key in layer._parameters} for layer in quantized
    }
    real = parameter_slots(modules)
    whole = {
        parameter: nn.Parameter(torch.empty(whole_shape(parameter, split.get(parameter)), device=device))
        for parameter in real
    }
    for parameter, slots in real.items():
        for module, name in slots:
            module._parameters[name] = whole[parameter]
    for layer in quantized:
        shape = whole_matrix_shape(layer.matrix_shape, split.get(stored[layer]["weight"]))
        layer._parameters["weight"] = nn.Parameter(torch.empty(shape, device=device))
    yield
    for layer in quantized:
        drawn = layer._parameters["weight"].detach()
        layer._parameters.update(stored[layer])
        fill_quantized_layer(layer, partial(_slice_of, drawn), split.get(stored[layer]["weight"]))
    for parameter, slots in real.items():
        for mapping in slice_mappings(parameter, split.get(parameter)):
            local_tensor(parameter)[mapping.local.slices].copy_(whole[parameter].detach()[mapping.whole.slices])
        for module, name in slots:
            module._parameters[name] = parameter


def _without_adapters(modules: list[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if not isinstance(module, Factor)]


def _children_first(module: nn.Module) -> list[nn.Module]:
    found = [inner for child in module.children() for inner in _children_first(child)]
    return [*dict.fromkeys(found), module]


def _slice_of(tensor: Tensor, wanted: TensorSlice) -> Tensor:
    return tensor[wanted.slices]


def _reseed(seed: int, name: str, device: torch.device) -> None:
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
    if device.type == "cpu":
        # For accelerators that are not in use, torch.manual_seed formats the stack each time: a tenth of a small start.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)
