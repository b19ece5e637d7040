"""An optimizer that the user made from a model's parameters, as training and checkpoints use it."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.mistakes import UserMistake
from shoal.optim.offload import OffloadedState, Store
from shoal.optim.optimizer import NamedOptimizer
from shoal.optim.zero1 import Partition
from shoal.parallel.placement import Placement

NAMES_SHOWN = 3


def named_optimizers(optimizer: Any) -> dict[str, Any]:
    """The optimizers of a run by name. One has none; several have the keys of a mapping, or their numbers."""
    if isinstance(optimizer, dict) and optimizer:
        return {str(name): one for name, one in optimizer.items()}
    if isinstance(optimizer, tuple | list) and optimizer:
        return {str(index): one for index, one in enumerate(optimizer)}
    return {"": optimizer}


def check_optimizers(optimizers: Mapping[str, Any], names: Mapping[nn.Parameter, str]) -> None:
    """A UserMistake unless each is a fresh optimizer over parameters of its own; those of the model have `names`."""
    owners: dict[nn.Parameter, str] = {}
    for key, optimizer in optimizers.items():
        _check(optimizer, names)
        for one in _parameters(optimizer):
            if (other := owners.setdefault(one, key)) != key:
                raise UserMistake(
                    f"{names[one]} is in two optimizers, {other!r} and {key!r}; a parameter is updated by one of them."
                )


def _check(optimizer: Any, names: Mapping[nn.Parameter, str]) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserMistake(
            f"run.prepare takes a torch optimizer second, or a tuple or dict of them, not a {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise UserMistake("LBFGS evaluates the loss several times per step, which run.step does not; use another.")
    foreign = [one for one in _parameters(optimizer) if one not in names]
    if foreign:
        shapes = ", ".join(str(tuple(one.shape)) for one in foreign[:NAMES_SHOWN])
        raise UserMistake(
            f"The optimizer has {len(foreign)} parameters that the model does not have (shapes {shapes}): build it "
            "from model.parameters() of the model that you pass to run.prepare."
        )
    if isinstance(optimizer, torch.optim.Adagrad):
        raise UserMistake("Adagrad has state before its first step, which run.prepare does not shard; use RMSprop.")
    if optimizer.state:
        raise UserMistake("The optimizer was stepped before run.prepare; prepare it first, or resume a checkpoint.")


def _parameters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [one for group in optimizer.param_groups for one in group["params"]]


def not_updated(optimizers: Iterable[torch.optim.Optimizer], names: Mapping[nn.Parameter, str]) -> str | None:
    """A warning of trained parameters that no optimizer updates."""
    given = {one for optimizer in optimizers for one in _parameters(optimizer)}
    found = [name for one, name in names.items() if one.requires_grad and one not in given]
    if not found:
        return None
    more = f" and {len(found) - NAMES_SHOWN} more" if len(found) > NAMES_SHOWN else ""
    shown = ", ".join(found[:NAMES_SHOWN]) + more
    return f"the optimizer does not update {shown}: they have gradients, but are in none of its groups."


class GivenOptimizer(NamedOptimizer):
    """A user's optimizer. Its groups keep the learning rates that the user or a schedule sets; `lr_scale` multiplies
    them in the update only, so that any schedule works."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, nn.Parameter],
        names: Mapping[nn.Parameter, str],
        *,
        partition: Partition | None = None,
        store: Store | None = None,
        lr_scale: float = 1.0,
    ) -> None:
        """`names` are those of the parameters that the optimizer was made from; `parameters`, by the same names, are
        those that it updates from now on: shards, under FSDP and ZeRO-1."""
        held = parameters if partition is None else partition.parameters
        for group in optimizer.param_groups:
            # ZeRO-1 shards trained parameters only, and no optimizer updates others.
            kept = [names[one] for one in group["params"]]
            group["params"] = [held[name] for name in kept if name in held]
        given = set(_parameters(optimizer))
        new: dict[Tensor, str] = {one: name for name, one in held.items() if one in given}
        super().__init__([optimizer], new, partition, None if store is None else OffloadedState(store))
        self.takes_factor = False  # not every optimizer with a `fused` option reads it
        self.optimizer = optimizer
        self.lr_scale = lr_scale
        self._checked = False
        self._sharded = any(isinstance(one, DTensor) for one in new)
        _choose_fused(optimizer)

    @property
    def lr(self) -> float:
        """The learning rate of the first group, as the update uses it."""
        return float(self.optimizer.param_groups[0]["lr"]) * self.lr_scale

    def step(self, lr: float | None, usable: Tensor, factor: Tensor | None = None) -> None:
        assert lr is None, "the groups have their own"
        kept = [group["lr"] for group in self.optimizer.param_groups]
        if self.lr_scale != 1.0:
            for group in self.optimizer.param_groups:
                group["lr"] = group["lr"] * self.lr_scale
        with _shards_apart(self.optimizer) if self._sharded else nullcontext():
            super().step(None, usable, factor)
        for group, before in zip(self.optimizer.param_groups, kept, strict=True):
            group["lr"] = before
        if not self._checked and self.optimizer.state:
            self._check_state()

    def _check_state(self) -> None:
        self._checked = True
        for fields in self.optimizer.state.values():
            for field, value in fields.items():
                if value is not None and not isinstance(value, Tensor):
                    raise UserMistake(
                        f"{type(self.optimizer).__name__} keeps {field} as a {type(value).__name__}, but only tensors "
                        "can be saved in a checkpoint; use an optimizer of torch.optim."
                    )

    def state(self) -> dict[str, Tensor]:
        return {
            f"{field}.{self.names[parameter]}": value
            for parameter, fields in self.optimizer.state.items()
            for field, value in fields.items()
            if value is not None
        }

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]:
        parameters = {name: one for one, name in self.names.items()}
        other = {
            key: shape
            for key, shape in stored.items()
            if shape and (name := key.partition(".")[2]) in parameters and shape != placement.shapes[name]
        }
        super().empty_state({key: shape for key, shape in stored.items() if key not in other}, placement)
        for key, shape in other.items():  # such as the rows and columns of Adafactor
            field, _, name = key.partition(".")
            parameter = parameters[name]
            if isinstance(parameter, DTensor):
                raise UserMistake(f"{key} of the checkpoint has shape {shape}, which cannot be loaded into shards.")
            self.optimizer.state[parameter][field] = torch.zeros(shape, device=parameter.device)
        return self.state()

    def groups(self) -> list[dict[str, Any]]:
        """The numbers that a schedule may have changed, by group: lr, and with some schedules momentum."""
        return [
            {key: number for key, value in group.items() if key != "params" and (number := _number(value)) is not None}
            for group in self.optimizer.param_groups
        ]

    def load_groups(self, groups: list[dict[str, Any]]) -> None:
        own = self.optimizer.param_groups
        if len(groups) != len(own):
            raise UserMistake(f"The checkpoint has {len(groups)} parameter groups, but the optimizer has {len(own)}.")
        for group, stored in zip(own, groups, strict=True):
            for key, value in stored.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(value, list) else value


@contextmanager
def _shards_apart(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """During an update, shards are in other groups than parameters that FSDP leaves whole: the kernels that update many
    tensors at once do not take both. Only for torch's optimizers: others may keep state in a group."""
    whole = optimizer.param_groups
    if not type(optimizer).__module__.startswith("torch.optim."):
        yield
        return
    optimizer.param_groups = [part for group in whole for part in _parts(group)]
    try:
        yield
    finally:
        optimizer.param_groups = whole


def _parts(group: dict[str, Any]) -> list[dict[str, Any]]:
    kinds: dict[bool, list[Tensor]] = {}
    for one in group["params"]:
        kinds.setdefault(isinstance(one, DTensor), []).append(one)
    return [{**group, "params": members} for members in kinds.values()] if len(kinds) > 1 else [group]


def _number(value: Any) -> Any:
    """`value` if it is a number or several, as JSON has them; else None. Flags are the script's own."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, tuple | list) and value and all(isinstance(one, int | float) for one in value):
        return list(value)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _choose_fused(optimizer: torch.optim.Optimizer) -> None:
    """Adam's fused kernel skips a step with non-finite gradients on the device, so that the host need not wait."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        undecided = not any(group.get(key) for key in ("foreach", "fused", "capturable", "differentiable"))
        if undecided and group["params"] and all(one.is_cuda for one in group["params"]):
            group["fused"] = True
