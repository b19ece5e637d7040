"""The buffers of a model: persistent ones are in files; the others, such as rotary frequencies, are recomputed."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.mistakes import UserMistake
from shoal.models.draw_weights import initializers
from shoal.models.names import sources_in_files
from shoal.models.stored import open_folder


def kept_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The persistent buffers, such as the routing bias of DeepSeek-V3."""
    return {
        f"{path}.{name}".lstrip("."): buffer
        for path, module in model.named_modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def read_buffers(model: Any, folder: Path) -> None:
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


def restore_buffers(model: Any, device: torch.device) -> None:
    """Non-persistent buffers such as rotary frequencies are in no checkpoint: `_init_weights` recomputes them.

    Floating-point buffers are filled with NaN first, so that `check_buffers` detects one that is not recomputed.
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
    initialize = initializers(model)
    for module in owners:
        initialize[module](module)
    if _unset_buffer(model) is not None:  # Falcon-H1's backbone initializes buffers of its blocks
        for module in model.modules():
            initialize[module](module)
    for parameter in done:
        del parameter._is_hf_initialized


def check_buffers(model: Any) -> None:
    if (name := _unset_buffer(model)) is not None:
        raise UserMistake(
            f"shoal cannot recompute the buffer {name} of {type(model).__name__}: "
            "this model's transformers code does not initialize it."
        )


def _unset_buffer(model: nn.Module) -> str | None:
    unset = (name for name, one in model.named_buffers() if one.is_floating_point() and bool(one.isnan().any()))
    return next(unset, None)
