"""Fill a model that was built on meta: memory for this rank's part only, then values, one piece at a time.

Values come from a Hugging Face folder (each rank reads its own slices) or from the seed. A random block is made whole
on every rank from a seed of its own, and each rank keeps its part: the same numbers whatever the split.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.conversion import Tensors, convert
from shoal.models.names import sources_in_files
from shoal.models.stored import Stored, open_folder
from shoal.models.tensor_slices import Split, Splits, local_slice, local_tensor, pieces, placed_like, whole_shape

Slots = dict[nn.Parameter, list[tuple[nn.Module, str]]]
NOT_SPLIT: Splits = {}


@dataclass(frozen=True)
class Weights:
    """Where values come from: a Hugging Face folder, or else the seed."""

    folder: Path | None
    seed: int


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
) -> None:
    """Give every parameter and buffer of `model` memory on `device`, and its value: no parameter's without `source`.

    `splits` says which parameters are parts of whole ones; with `offload` those that are sharded live in the host's
    memory; `vectors` is the type of norms and biases where that is another.
    """
    for parameter, places in parameter_slots(model).items():
        home = torch.device("cpu") if offload and isinstance(parameter, DTensor) else device
        _allocate(parameter, places, home, vectors if vectors is not None and parameter.dim() < 2 else dtype)
    if source is not None and source.folder is not None:
        _read_weights(model, source.folder, splits)
    elif source is not None:
        _draw_weights(model, anatomy, device, source.seed, splits)
    _restore_buffers(model, device)
    if source is not None and source.folder is not None:
        _read_buffers(model, source.folder)


def parameter_slots(model: nn.Module) -> Slots:
    """Every distinct parameter with the places it stands in; a tied weight stands in two."""
    slots: Slots = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((module, name))
    return slots


def _allocate(
    parameter: nn.Parameter, places: list[tuple[nn.Module, str]], device: torch.device, dtype: torch.dtype
) -> None:
    """`Module.to_empty` would give each place of a tied weight a tensor of its own; here they stay one."""
    local = torch.empty(local_slice(parameter).shape, device=device, dtype=dtype)
    filled = nn.Parameter(placed_like(local, parameter), requires_grad=parameter.requires_grad)
    for module, name in places:
        module._parameters[name] = filled


def _draw_weights(model: Any, anatomy: Anatomy, device: torch.device, seed: int, splits: Splits) -> None:
    """Draw each block, then all the rest, as transformers would, from seeds that depend on names alone."""
    names = {module: name for name, module in model.named_modules()}
    inside = {module for name in anatomy.blocks for module in model.get_submodule(name).modules()}
    cut = {parameter: splits[name] for name, parameter in model.named_parameters() if name in splits}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for name in anatomy.blocks:
            modules = _children_first(model.get_submodule(name))
            _reseed(seed, name)
            with _whole_parameters(modules, device, cut):
                for module in modules:
                    model._init_weights(module)
        # Each with a seed of its own: a stage of a pipeline has some of them only.
        outside = [module for module in _children_first(model) if module not in inside]
        with _whole_parameters(outside, device, cut):
            for module in outside:
                _reseed(seed, names[module])
                model._init_weights(module)


def _reseed(seed: int, name: str) -> None:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    torch.manual_seed(int.from_bytes(digest[:7], "big"))


def _children_first(module: nn.Module) -> list[nn.Module]:
    found = [inner for child in module.children() for inner in _children_first(child)]
    return [*dict.fromkeys(found), module]


@contextmanager
def _whole_parameters(modules: list[nn.Module], device: torch.device, cut: dict[nn.Parameter, Split]) -> Iterator[None]:
    """Put whole fp32 tensors in the modules' places, and copy this rank's part back into the real ones at the end."""
    real: Slots = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                real.setdefault(parameter, []).append((module, name))
    whole = {
        parameter: nn.Parameter(torch.empty(whole_shape(parameter, cut.get(parameter)), device=device))
        for parameter in real
    }
    for parameter, places in real.items():
        for module, name in places:
            module._parameters[name] = whole[parameter]
    yield
    for parameter, places in real.items():
        for piece in pieces(parameter, cut.get(parameter)):
            local_tensor(parameter)[piece.local.slices].copy_(whole[parameter].detach()[piece.whole.slices])
        for module, name in places:
            module._parameters[name] = parameter


def _restore_buffers(model: Any, device: torch.device) -> None:
    """Rotary frequencies and the like are in no checkpoint: transformers makes them anew in `_init_weights`.

    Floating buffers are poisoned first, so that one which was not made anew is found here and not in a strange loss.
    """
    owners = [module for module in model.modules() if any(buffer is not None for buffer in module._buffers.values())]
    for module in owners:
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                fresh = torch.empty_like(buffer, device=device)
                module._buffers[name] = fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh
    done = list(model.parameters())
    for parameter in done:
        parameter._is_hf_initialized = True  # transformers' own mark for "leave this one alone"
    for module in owners:
        model._init_weights(module)
    for parameter in done:
        del parameter._is_hf_initialized
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and bool(buffer.isnan().any()):
            raise UserMistake(
                f"shoal cannot make the buffer {name} of {type(model).__name__} anew; "
                "this model's transformers code does not say how."
            )


def locate_weights(model: Any, folder: Path, splits: Splits = NOT_SPLIT) -> dict[str, Stored]:
    """Where the values of each parameter lie. Reads headers only, and compares shapes."""
    files = open_folder(folder)
    parameters = dict(model.named_parameters())
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
        elif name in parameters:
            found[name] = files.find(first)
            origin[name] = f"{files.file_of(first)} holds {first}"
    if missing := [name for name in parameters if name not in found]:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserMistake(f"{folder} holds no tensor {missing[0]}{more}, which {type(model).__name__} needs.")
    for name, parameter in parameters.items():
        if found[name].shape != (wanted := whole_shape(parameter, splits.get(name))):
            raise UserMistake(
                f"{origin[name]} with shape {found[name].shape}, but the model's config makes it {wanted}."
            )
    return {name: found[name] for name in parameters}


def _read_weights(model: Any, folder: Path, splits: Splits) -> None:
    """Each rank reads its own part of each tensor."""
    stored = locate_weights(model, folder, splits)
    for name, parameter in model.named_parameters():
        for piece in pieces(parameter, splits.get(name)):
            local_tensor(parameter)[piece.local.slices].copy_(stored[name].read(piece.whole))


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that files and checkpoints hold beside the parameters, such as the routing bias of DeepSeek-V3."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _read_buffers(model: Any, folder: Path) -> None:
    """Every rank has buffers whole. One that is not in the files stays as it was made."""
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
