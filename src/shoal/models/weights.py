"""Fill a model that was built on meta: memory for this rank's part only, then values, one piece at a time.

Values come from a Hugging Face folder (each rank reads its own slices) or from the seed. A random block is made whole
on every rank from a seed of its own, and each rank keeps its part: the same numbers whatever the split.
"""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.names import names_in_model
from shoal.models.pieces import local_box, local_tensor

Slots = dict[nn.Parameter, list[tuple[nn.Module, str]]]


@dataclass(frozen=True)
class Weights:
    """Where values come from: a Hugging Face folder, or else the seed."""

    folder: Path | None
    seed: int


def materialize(
    model: Any, anatomy: Anatomy, *, device: torch.device, dtype: torch.dtype, source: Weights | None
) -> None:
    """Give every parameter and buffer of `model` memory on `device`, and its value: no parameter's without `source`."""
    _allocate(model, device, dtype)
    if source is not None and source.folder is not None:
        _read_weights(model, source.folder)
    elif source is not None:
        _draw_weights(model, anatomy, device, source.seed)
    _restore_buffers(model, device)


def parameter_slots(model: nn.Module) -> Slots:
    """Every distinct parameter with the places it stands in; a tied weight stands in two."""
    slots: Slots = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append((module, name))
    return slots


def _allocate(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """`Module.to_empty` would give each place of a tied weight a tensor of its own; here they stay one."""
    for parameter, places in parameter_slots(model).items():
        data: Tensor
        if isinstance(parameter, DTensor):
            local = torch.empty(local_box(parameter).shape, device=device, dtype=dtype)
            data = DTensor.from_local(
                local,
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        else:
            data = torch.empty(parameter.shape, device=device, dtype=dtype)
        filled = nn.Parameter(data, requires_grad=parameter.requires_grad)
        for module, name in places:
            module._parameters[name] = filled


def _draw_weights(model: Any, anatomy: Anatomy, device: torch.device, seed: int) -> None:
    """Draw each block, then all the rest, as transformers would, from seeds that depend on the block's name alone."""
    blocks = {name: model.get_submodule(name) for name in anatomy.blocks}
    inside = {id(module) for block in blocks.values() for module in block.modules()}
    units = {name: _children_first(block) for name, block in blocks.items()}
    units["outside the blocks"] = [module for module in _children_first(model) if id(module) not in inside]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for name, modules in units.items():
            digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            with _whole_parameters(modules, device):
                for module in modules:
                    model._init_weights(module)


def _children_first(module: nn.Module) -> list[nn.Module]:
    found = [inner for child in module.children() for inner in _children_first(child)]
    return [*dict.fromkeys(found), module]


@contextmanager
def _whole_parameters(modules: list[nn.Module], device: torch.device) -> Iterator[None]:
    """Put whole fp32 tensors in the modules' places, and copy this rank's part back into the real ones at the end."""
    real: Slots = {}
    for module in modules:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                real.setdefault(parameter, []).append((module, name))
    whole = {parameter: nn.Parameter(torch.empty(parameter.shape, device=device)) for parameter in real}
    for parameter, places in real.items():
        for module, name in places:
            module._parameters[name] = whole[parameter]
    yield
    for parameter, places in real.items():
        local_tensor(parameter).copy_(whole[parameter].detach()[local_box(parameter).slices])
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


def locate_weights(model: Any, folder: Path) -> dict[str, tuple[Path, str]]:
    """For each parameter the file that holds it and its name there. Reads headers only, and compares shapes."""
    files = _tensor_files(folder)
    names = names_in_model(model, files)
    found: dict[str, tuple[Path, str]] = {}
    missing: list[str] = []
    opened: dict[Path, Any] = {}
    for name, parameter in model.named_parameters():
        stored = names.get(name)
        if stored is None:
            missing.append(name)
            continue
        path = folder / files[stored]
        try:
            if path not in opened:
                opened[path] = safe_open(path, framework="pt")
            source = opened[path].get_slice(stored)
            shape, dtype = tuple(source.get_shape()), source.get_dtype()
        except SafetensorError as error:
            raise UserMistake(f"{path} is damaged: {error}") from None
        if shape != tuple(parameter.shape):
            raise UserMistake(
                f"{path} holds {stored} with shape {shape}, but the model's config makes it {tuple(parameter.shape)}."
            )
        if dtype not in ("F64", "F32", "F16", "BF16"):
            raise UserMistake(
                f"{path} holds {stored} as {dtype}: quantised weights cannot be trained; use the originals."
            )
        found[name] = (path, stored)
    if missing:
        more = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise UserMistake(f"{folder} holds no tensor {missing[0]}{more}, which {type(model).__name__} needs.")
    return found


def _read_weights(model: Any, folder: Path) -> None:
    """Each rank reads its own part of each tensor."""
    places = locate_weights(model, folder)
    opened: dict[Path, Any] = {}
    for name, parameter in model.named_parameters():
        path, stored = places[name]
        if path not in opened:
            opened[path] = safe_open(path, framework="pt")
        slices = local_box(parameter).slices
        source = opened[path].get_slice(stored)[slices] if slices else opened[path].get_tensor(stored)
        local_tensor(parameter).copy_(source)


def _tensor_files(folder: Path) -> dict[str, str]:
    """For each tensor stored in the folder, the name of its safetensors file."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            table = json.loads(index.read_text())["weight_map"]
            files = {str(name): str(file) for name, file in table.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserMistake(f"{index} is not a safetensors index.") from None
        for file in sorted(set(files.values())):
            if Path(file).name != file or not (folder / file).is_file():
                raise UserMistake(f"{index} names {file}, which is not a file of that folder.")
        return files
    single = folder / "model.safetensors"
    if not single.is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*.bin"))[:2])
        note = f" ({found} is a pickle, which shoal does not read)" if found else ""
        raise UserMistake(f"{folder} holds no model.safetensors{note}; save it with save_pretrained.")
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single.name)
    except SafetensorError as error:
        raise UserMistake(f"{single} is damaged: {error}") from None
