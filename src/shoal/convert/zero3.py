"""Reads a ZeRO-3 checkpoint of DeepSpeed, in which every rank has a partition of each parameter.

The ranks' `*_optim_states.pt` hold the fp32 weights in flat groups, and `*_model_states.pt` the shapes in their order.
Both are read with `weights_only=True`. The classes of DeepSpeed that they name are replaced by `Inert`, which keeps
nothing, so that none of its code is needed or run.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.convert.state_dicts import read_tensors
from shoal.mistakes import UserMistake
from shoal.models.stored import InMemory, Stored
from shoal.models.tensor_slices import TensorSlice

MODEL_FILES = "*zero_pp_rank_*_mp_rank_00_model_states.pt"
OPTIMIZER_FILES = "*zero_pp_rank_*_mp_rank_00_optim_states.pt"


class Inert:
    """In the place of a class of DeepSpeed: takes what it is given, and keeps nothing."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, _: Any) -> None:
        pass


# What DeepSpeed's optimizer states name beside tensors.
NAMED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


@dataclass(frozen=True)
class Gathered:
    """A parameter that is partitioned over ranks: the same range of each rank's flat weights, padded at the end."""

    shape: tuple[int, ...]
    ranks: tuple[tuple[Tensor, ...], ...]  # the flat groups of each rank
    start: int
    length: int  # of each rank

    @property
    def dtype(self) -> torch.dtype:
        return self.ranks[0][0].dtype

    def read(self, tensor_slice: TensorSlice) -> Tensor:
        parts = [part for groups in self.ranks for part in _range(groups, self.start, self.length)]
        whole = torch.cat(parts)[: math.prod(self.shape)].view(self.shape)
        return whole[tensor_slice.slices] if tensor_slice.shape else whole


def _range(groups: tuple[Tensor, ...], start: int, length: int) -> Iterator[Tensor]:
    """The elements from `start` on of flat groups that follow each other."""
    for group in groups:
        if start < group.numel() and length > 0:
            part = group[start : start + length]
            yield part
            length -= part.numel()
        start = max(0, start - group.numel())


def is_zero3(folder: Path) -> bool:
    return any(folder.glob(MODEL_FILES))


def read_zero3(folder: Path) -> dict[str, Stored]:
    """The parameters and buffers of a ZeRO-3 checkpoint, by name. No values are read yet."""
    models, optimizers = _by_rank(folder, MODEL_FILES), _by_rank(folder, OPTIMIZER_FILES)
    ranks = len(models)
    if not optimizers:
        raise UserMistake(
            f"{folder} holds no optim_states.pt, in which ZeRO 3 has the weights; copy the files of all ranks."
        )
    if sorted(models) != list(range(ranks)) or sorted(optimizers) != list(range(ranks)):
        raise UserMistake(
            f"{folder} holds the weights of the ranks {_listed(optimizers)} and the shapes of "
            f"the ranks {_listed(models)}; "
            "copy the files of all ranks."
        )
    with torch.serialization.safe_globals([(Inert, name) for name in NAMED]):
        state = read_tensors(models[0])
        flat = tuple(_flat_groups(optimizers[rank], ranks) for rank in range(ranks))
        frozen = _frozen(state, [state, *(read_tensors(models[rank]) for rank in range(1, ranks))])
    found: dict[str, Stored] = {**_buffers(state), **frozen}
    at = 0
    for shapes in _mapping_list(models[0], state, "param_shapes"):
        for name, shape in shapes.items():
            length = math.ceil(math.prod(shape) / ranks)
            found[str(name)] = Gathered(tuple(shape), flat, at, length)
            at += length
    if any(sum(group.numel() for group in groups) != at for groups in flat):
        raise UserMistake(f"{folder} holds weights that do not belong to the shapes in {models[0].name}.")
    for name, other in (state.get("shared_params") or {}).items():
        if str(other) in found:
            found[str(name)] = found[str(other)]
    return found


def _by_rank(folder: Path, pattern: str) -> dict[int, Path]:
    found: dict[int, Path] = {}
    for file in folder.glob(pattern):
        if match := re.search(r"zero_pp_rank_(\d+)_mp_rank", file.name):
            found[int(match[1])] = file
    return found


def _listed(ranks: Mapping[int, Path]) -> str:
    return ", ".join(map(str, sorted(ranks))) or "(none)"


def _flat_groups(file: Path, ranks: int) -> tuple[Tensor, ...]:
    loaded = read_tensors(file)
    inner = loaded.get("optimizer_state_dict") if isinstance(loaded, Mapping) else None
    groups = inner.get("fp32_flat_groups") if isinstance(inner, Mapping) else None
    if not isinstance(groups, list) or not all(isinstance(one, Tensor) for one in groups) or not groups:
        raise UserMistake(f"{file} holds no fp32_flat_groups, the weights of a ZeRO-3 checkpoint.")
    count = inner.get("partition_count", ranks) if isinstance(inner, Mapping) else ranks
    count = max(count) if isinstance(count, list) else count
    if count != ranks:
        raise UserMistake(f"{file} is one of {count} ranks, and the folder has {ranks}; copy the files of all ranks.")
    return tuple(one.flatten() for one in groups)


def _mapping_list(file: Path, state: Any, key: str) -> list[Mapping[str, Any]]:
    found = state.get(key) if isinstance(state, Mapping) else None
    if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
        raise UserMistake(f"{file} holds no {key}, the names and shapes of a ZeRO-3 checkpoint.")
    return found


def _buffers(state: Mapping[str, Any]) -> dict[str, Stored]:
    names = set(state.get("buffer_names") or ())
    return {name: InMemory(one) for name, one in (state.get("module") or {}).items() if name in names}


def _frozen(state: Mapping[str, Any], every: list[Any]) -> dict[str, Stored]:
    shapes = state.get("frozen_param_shapes") or {}
    parts = [one.get("frozen_param_fragments") or {} for one in every]
    return {
        str(name): Gathered(tuple(shape), tuple((part[name].flatten(),) for part in parts), 0, parts[0][name].numel())
        for name, shape in shapes.items()
    }
