"""Materialize a model from the meta device: allocate this rank's shards only, then load or initialize their values.

Values come from a Hugging Face folder, of which each rank reads its own slices, or from the seed. For random
initialization every rank draws each block in full from a seed of its own and keeps its shard, so the values do not
depend on the parallel layout.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.mistakes import UserMistake
from shoal.models.adapters import MAGNITUDE, UP, Factor, adapter_parameters, row_norms
from shoal.models.anatomy import Anatomy
from shoal.models.conversion import Tensors, convert
from shoal.models.names import counted, sources_in_files, unused_in_files
from shoal.models.new_rows import ExtendedRows, NewRows
from shoal.models.nf4_layers import STORED, fill_quantized, is_quantized, quantized_layers
from shoal.models.peft_weights import locate_adapter
from shoal.models.stored import Stored, equal_values, open_folder
from shoal.models.tensor_slices import (
    Split,
    Splits,
    TensorSlice,
    local_slice,
    local_tensor,
    placed_like,
    slice_mappings,
    whole_shape,
)

Slots = dict[nn.Parameter, list[tuple[nn.Module, str]]]
NOT_SPLIT: Splits = {}
NO_NEW_ROWS: Mapping[str, NewRows] = {}


@dataclass(frozen=True)
class Weights:
    """The source of values: a Hugging Face folder, or else the seed."""

    folder: Path | None
    seed: int
    new_rows: Mapping[str, NewRows] = field(default_factory=dict)  # of added tokens, if there is a folder
    adapter: Path | None = None  # a folder in PEFT's format with the adapter's first values


def materialize(
    model: Any,
    anatomy: Anatomy,
    *,
    device: torch.device,
    dtype: torch.dtype,
    source: Weights | None,
    splits: Splits = NOT_SPLIT,
    offload: bool = False,
    vectors: torch.dtype | None = None,
    frozen: torch.dtype | None = None,
) -> None:
    """Allocate every parameter and buffer of `model` on `device` and set its value. Without `source`, parameters stay
    uninitialized.

    `splits`: the parameters that tensor parallelism has split. `offload`: sharded parameters live in CPU memory.
    `vectors`: the dtype of norms and biases, and `frozen`: of parameters that are not trained, if it differs from
    `dtype`.
    """
    for parameter, slots in parameter_slots(model).items():
        home = torch.device("cpu") if offload and isinstance(parameter, DTensor) else device
        kind = frozen if frozen is not None and not parameter.requires_grad else dtype
        _allocate(parameter, slots, home, vectors if vectors is not None and parameter.dim() < 2 else kind)
    if source is not None and source.folder is not None:
        _read_weights(model, source.folder, splits, source.new_rows)
    elif source is not None:
        _draw_weights(model, anatomy, device, source.seed, splits)
    if source is not None and source.adapter is not None:
        _read_stored(dict(model.named_parameters()), locate_adapter(model, source.adapter), splits)
    elif source is not None:
        _start_adapters(model, source.seed, splits)
    _restore_buffers(model, device)
    if source is not None and source.folder is not None:
        _read_buffers(model, source.folder)
    _check_buffers(model)


def parameter_slots(model: nn.Module) -> Slots:
    """Every distinct parameter with the (module, name) slots that hold it; a tied weight has two."""
    slots: Slots = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((module, name))
    return slots


def _allocate(
    parameter: nn.Parameter, slots: list[tuple[nn.Module, str]], device: torch.device, dtype: torch.dtype
) -> None:
    """Keeps tied weights tied, whereas `Module.to_empty` would allocate a tensor for each slot."""
    local = torch.empty(local_slice(parameter).shape, device=device, dtype=dtype)
    filled = nn.Parameter(placed_like(local, parameter), requires_grad=parameter.requires_grad)
    for module, name in slots:
        module._parameters[name] = filled


def _draw_weights(model: Any, anatomy: Anatomy, device: torch.device, seed: int, splits: Splits) -> None:
    """Initialize each block, then the other modules, as transformers does, from seeds that depend on names only."""
    names = {module: name for name, module in model.named_modules()}
    inside = {module for name in anatomy.blocks for module in model.get_submodule(name).modules()}
    split = {parameter: splits[name] for name, parameter in model.named_parameters() if name in splits}
    devices = [device] if device.type == "cuda" else []
    initialize = _initializers(model)
    with torch.random.fork_rng(devices=devices):
        for name in anatomy.blocks:
            modules = _without_adapters(_children_first(model.get_submodule(name)))
            _reseed(seed, name, device)
            with _whole_parameters(modules, device, split):
                for module in modules:
                    initialize[module](module)
        # Each with a seed of its own: a pipeline stage has only some of them.
        outside = [module for module in _children_first(model) if module not in inside]
        with _whole_parameters(outside, device, split):
            for module in outside:
                _reseed(seed, names[module], device)
                initialize[module](module)


def _without_adapters(modules: list[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if not isinstance(module, Factor)]


def _start_adapters(model: nn.Module, seed: int, splits: Splits) -> None:
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


def _initializers(model: Any) -> dict[nn.Module, Callable[[nn.Module], None]]:
    """The function that initializes each module: `_init_weights` of the innermost transformers model that holds it."""
    found: dict[nn.Module, Callable[[nn.Module], None]] = {}

    def visit(module: Any, outer: Callable[[nn.Module], None]) -> None:
        found[module] = getattr(module, "_init_weights", outer)
        for child in module.children():
            visit(child, found[module])

    visit(model, model._init_weights)
    return found


def _reseed(seed: int, name: str, device: torch.device) -> None:
    number = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:7], "big")
    if device.type == "cpu":
        # For accelerators that are not in use, torch.manual_seed formats the stack each time: a tenth of a small start.
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def _children_first(module: nn.Module) -> list[nn.Module]:
    found = [inner for child in module.children() for inner in _children_first(child)]
    return [*dict.fromkeys(found), module]


@contextmanager
def _whole_parameters(
    modules: list[nn.Module], device: torch.device, split: dict[nn.Parameter, Split]
) -> Iterator[None]:
    """Temporarily give the modules unsharded fp32 parameters, and copy this rank's shards back at the end."""
    real: Slots = {}
    quantized: list[Any] = [module for module in modules if is_quantized(module)]
    stored = {
        layer: {key: layer._parameters.pop(key) for key in STORED if key in layer._parameters} for layer in quantized
    }
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                real.setdefault(parameter, []).append((module, name))
    whole = {
        parameter: nn.Parameter(torch.empty(whole_shape(parameter, split.get(parameter)), device=device))
        for parameter in real
    }
    for parameter, slots in real.items():
        for module, name in slots:
            module._parameters[name] = whole[parameter]
    for layer in quantized:
        shape = _whole(layer.matrix_shape, split.get(stored[layer]["weight"]))
        layer._parameters["weight"] = nn.Parameter(torch.empty(shape, device=device))
    yield
    for layer in quantized:
        drawn = layer._parameters["weight"].detach()
        layer._parameters.update(stored[layer])
        _fill_quantized(layer, partial(_slice_of, drawn), split.get(stored[layer]["weight"]))
    for parameter, slots in real.items():
        for mapping in slice_mappings(parameter, split.get(parameter)):
            local_tensor(parameter)[mapping.local.slices].copy_(whole[parameter].detach()[mapping.whole.slices])
        for module, name in slots:
            module._parameters[name] = parameter


def _slice_of(tensor: Tensor, wanted: TensorSlice) -> Tensor:
    return tensor[wanted.slices]


def _restore_buffers(model: Any, device: torch.device) -> None:
    """Non-persistent buffers such as rotary frequencies are in no checkpoint: `_init_weights` recomputes them.

    Floating-point buffers are filled with NaN first, so that `_check_buffers` detects one that is not recomputed.
    """
    owners = [module for module in model.modules() if any(buffer is not None for buffer in module._buffers.values())]
    for module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                fresh = torch.empty_like(buffer, device=device)
                module._buffers[name] = fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh
    done = list(model.parameters())
    for parameter in done:
        parameter._is_hf_initialized = True  # transformers skips parameters with this mark
    initialize = _initializers(model)
    for module in owners:
        initialize[module](module)
    if _unset_buffer(model) is not None:  # Falcon-H1's backbone initializes buffers of its blocks
        for module in model.modules():
            initialize[module](module)
    for parameter in done:
        del parameter._is_hf_initialized


def _check_buffers(model: Any) -> None:
    if (name := _unset_buffer(model)) is not None:
        raise UserMistake(
            f"shoal cannot recompute the buffer {name} of {type(model).__name__}: "
            "this model's transformers code does not initialize it."
        )


def _unset_buffer(model: nn.Module) -> str | None:
    unset = (name for name, one in model.named_buffers() if one.is_floating_point() and bool(one.isnan().any()))
    return next(unset, None)


def locate_weights(
    model: Any, folder: Path, splits: Splits = NOT_SPLIT, new_rows: Mapping[str, NewRows] = NO_NEW_ROWS
) -> dict[str, Stored]:
    """The stored tensor of each parameter, with `new_rows` of added tokens. Reads headers only, and checks shapes."""
    files = open_folder(folder)
    shapes = {name: whole_shape(one, splits.get(name)) for name, one in _base_parameters(model).items()}
    shapes |= {
        f"{name}.weight": _whole(layer.matrix_shape, splits.get(f"{name}.weight"))
        for name, layer in quantized_layers(model).items()
    }
    names = _parameter_names(model)
    found: dict[str, Stored] = {}
    origin: dict[str, str] = {}
    for name, sources in sources_in_files(model, files.files).items():
        first, *others = sources.all_names
        if sources.converter is not None:
            stored: Tensors = {pattern: [files.find(one) for one in names] for pattern, names in sources.names.items()}
            made = convert(model, name, sources.converter, stored)
            found |= made
            more = f" and {len(others)} others, together" if others else ", converted"
            origin |= dict.fromkeys(made, f"{folder} holds {first}{more}")
        elif name in names and names[name] not in found:  # files may hold a tied weight by its other name only
            found[names[name]] = files.find(first)
            origin[names[name]] = f"{files.file_of(first)} holds {first}"
    if missing := [name for name in shapes if name not in found]:
        raise UserMistake(f"{folder} holds no tensor {counted(missing)}, which {type(model).__name__} needs.")
    found |= {name: ExtendedRows(found[name], rows) for name, rows in new_rows.items() if name in shapes}
    for name, wanted in shapes.items():
        if found[name].shape != wanted:
            raise UserMistake(
                f"{origin[name]} with shape {found[name].shape}, but the model's config makes it {wanted}."
            )
    return {name: found[name] for name in shapes}


def _whole(shape: tuple[int, int], split: Split | None) -> tuple[int, ...]:
    return shape if split is None else split.whole_shape(shape)


def _base_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have values of their own in the files: neither those of adapters nor quantized ones."""
    others = {*adapter_parameters(model), *(f"{layer}.{key}" for layer in quantized_layers(model) for key in STORED)}
    return {name: parameter for name, parameter in model.named_parameters() if name not in others}


def _fill_quantized(layer: Any, read: Callable[[TensorSlice], Tensor], split: Split | None) -> None:
    """DoRA's magnitudes start as the norms of the rows as they are quantized."""

    def start_magnitude(rows: Tensor, first: int) -> None:
        if MAGNITUDE in layer._modules:
            local_tensor(layer._modules[MAGNITUDE].weight).copy_(row_norms(rows))

    fill_quantized(layer, read, split, start_magnitude)


def _parameter_names(model: nn.Module) -> dict[str, str]:
    """The name by which `named_parameters` lists each parameter; a tied weight has several."""
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def check_stored(model: Any, folder: Path, new_rows: Mapping[str, NewRows] = NO_NEW_ROWS) -> None:
    """A UserMistake if the files of `folder` are not this model: a tensor is missing, left over, of another shape, or
    differs from the one it is tied to. `model` is the whole model, not a stage of a pipeline."""
    locate_weights(model, folder, new_rows=new_rows)
    files = open_folder(folder)
    sources = sources_in_files(model, files.files)
    if unused := unused_in_files(model, files.files, sources):
        raise UserMistake(
            f"{folder} holds {counted(unused)}, which {type(model).__name__} does not have: its config.json describes "
            "another model. Correct it, or drop them with from_pretrained and save_pretrained of transformers."
        )
    for name, tied_to in _parameter_names(model).items():
        if name != tied_to and name in sources and tied_to in sources:
            one, other = (files.find(sources[each].all_names[0]) for each in (name, tied_to))
            if not equal_values(one, other):
                raise UserMistake(
                    f"{folder} holds a {name} that differs from {tied_to}, but its config.json ties them; set "
                    "tie_word_embeddings to false there."
                )


def _read_weights(model: Any, folder: Path, splits: Splits, new_rows: Mapping[str, NewRows]) -> None:
    """Each rank reads its own slices of each tensor."""
    stored = locate_weights(model, folder, splits, new_rows)
    plain = _base_parameters(model)
    _read_stored(plain, {name: stored[name] for name in plain}, splits)
    for name, layer in quantized_layers(model).items():
        weight = f"{name}.weight"
        _fill_quantized(layer, stored[weight].read, splits.get(weight))


def _read_stored(parameters: Mapping[str, nn.Parameter], stored: Mapping[str, Stored], splits: Splits) -> None:
    for name, source in stored.items():
        for mapping in slice_mappings(parameters[name], splits.get(name)):
            local_tensor(parameters[name])[mapping.local.slices].copy_(source.read(mapping.whole))


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, such as the routing bias of DeepSeek-V3."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _read_buffers(model: Any, folder: Path) -> None:
    """Buffers are replicated. One that is not in the files keeps its initial value."""
    if not (kept := kept_buffers(model)):
        return
    files = open_folder(folder)
    sources = sources_in_files(model, files.files)
    for name, buffer in kept.items():
        if name not in sources:
            continue
        stored = sources[name].all_names[0]
        value = files.open(stored).get_tensor(stored)
        if value.shape != buffer.shape:
            raise UserMistake(
                f"{files.file_of(stored)} holds {stored} with shape {tuple(value.shape)}, but the model's config makes "
                f"it {tuple(buffer.shape)}."
            )
        buffer.copy_(value)
