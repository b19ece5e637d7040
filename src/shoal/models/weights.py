"""Materialize a model from the meta device: allocate this rank's shards only, then load or initialize their values.

Values come from a Hugging Face folder (`models.read_weights`) or from the seed (`models.draw_weights`), and do not
depend on the parallel layout.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shoal.models.anatomy import Anatomy
from shoal.models.buffers import check_buffers, read_buffers, restore_buffers
from shoal.models.draw_weights import draw_fresh, draw_weights, start_adapters
from shoal.models.new_rows import NewRows
from shoal.models.peft_weights import locate_adapter
from shoal.models.read_weights import fresh_parameters, read_stored, read_weights
from shoal.models.slots import parameter_slots
from shoal.models.tensor_slices import NOT_SPLIT, Splits, local_slice, placed_like


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
    host: bool = False,
    vectors: torch.dtype | None = None,
    frozen: torch.dtype | None = None,
) -> None:
    """Allocate every parameter and buffer of `model` on `device` and set its value. Without `source`, parameters stay
    uninitialized.

    `splits`: the parameters that tensor parallelism has split. `offload`: sharded parameters live in CPU memory, and
    `host`: all parameters.
    `vectors`: the dtype of norms and biases, and `frozen`: of parameters that are not trained, if it differs from
    `dtype`.
    """
    for parameter, slots in parameter_slots(model.modules()).items():
        home = torch.device("cpu") if host or (offload and isinstance(parameter, DTensor)) else device
        kind = frozen if frozen is not None and not parameter.requires_grad else dtype
        _allocate(parameter, slots, home, vectors if vectors is not None and parameter.dim() < 2 else kind)
    if source is not None and source.folder is not None:
        read_weights(model, source.folder, splits, source.new_rows)
        draw_fresh(model, fresh_parameters(model, source.folder), device, source.seed, splits)
    elif source is not None:
        draw_weights(model, anatomy, device, source.seed, splits)
    if source is not None and source.adapter is not None:
        read_stored(dict(model.named_parameters()), locate_adapter(model, source.adapter), splits)
    elif source is not None:
        start_adapters(model, source.seed, splits)
    restore_buffers(model, device)
    if source is not None and source.folder is not None:
        read_buffers(model, source.folder)
    check_buffers(model)


def _allocate(
    parameter: nn.Parameter, slots: list[tuple[nn.Module, str]], device: torch.device, dtype: torch.dtype
) -> None:
    """Keeps tied weights tied, whereas `Module.to_empty` would allocate a tensor for each slot."""
    local = torch.empty(local_slice(parameter).shape, device=device, dtype=dtype)
    filled = nn.Parameter(placed_like(local, parameter), requires_grad=parameter.requires_grad)
    for module, name in slots:
        module._parameters[name] = filled
