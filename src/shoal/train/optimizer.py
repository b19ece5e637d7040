"""The optimizer: which parameters decay, at which rate each learns, and its state by name."""

from collections.abc import Mapping
from contextlib import nullcontext
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.schema import OptimizerConfig, TrainConfig
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.parallel.placement import Placement
from shoal.train.lion import Lion
from shoal.train.offload import OffloadedState, Store, buckets
from shoal.train.partition import Partition


class NamedOptimizer:
    """One or more torch optimizers over parameters that have names. The rate is given at every step."""

    def __init__(
        self,
        parts: list[torch.optim.Optimizer],
        names: Mapping[Tensor, str],
        partition: Partition | None = None,
        offloaded: OffloadedState | None = None,
    ) -> None:
        self.parts = parts
        self.names = names
        self.partition = partition  # ZeRO-1: each replica updates its rows
        self.offloaded = offloaded

    def step(self, rate: float, usable: Tensor) -> None:
        """Update the weights, unless `usable` is false: then nothing changes, the optimizer's state included."""
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = rate * group["rate_factor"]
        if self.partition is not None:
            self.partition.take_gradients()
        fused = all(group.get("fused") for part in self.parts for group in part.param_groups)
        if fused:  # the kernel itself looks at the flag, and the host need not wait for it
            for part in self.parts:
                part.found_inf = (~usable).float()  # type: ignore[attr-defined]
        if fused or bool(usable):
            for part in self.parts:
                with nullcontext() if self.offloaded is None else self.offloaded.on_device(part):
                    part.step()
            if self.partition is not None:
                self.partition.send_rows()

    def state(self) -> dict[str, Tensor]:
        """Every state tensor under 'field.parameter name'."""
        return {
            f"{field}.{self.names[parameter]}": value
            for part in self.parts
            for parameter, fields in part.state.items()
            for field, value in fields.items()
        }

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]:
        """Make the state that `stored` (name → whole shape) describes, as far as it is this rank's, ready to be filled,
        and return it as `state` does."""
        places = {
            self.names[parameter]: (part, parameter, bool(group.get("fused")))
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        }
        for key, shape in stored.items():
            field, _, name = key.partition(".")
            if name not in places:
                continue
            part, parameter, fused = places[name]
            value: Tensor
            if shape and tuple(shape) == placement.whole_shape(name, parameter):
                if self.offloaded is not None:
                    value = self.offloaded.store.empty_like(parameter)
                else:
                    value = torch.zeros_like(parameter, requires_grad=False)
            else:  # a counter: fused kernels read it on the device, the others on the host
                value = torch.zeros(shape, device=parameter.device if fused else "cpu")
            part.state[parameter][field] = value
        for name, (part, parameter, _) in places.items():  # what the checkpoint does not know of is no part of the run
            for field in [one for one in part.state.get(parameter, ()) if f"{one}.{name}" not in stored]:
                del part.state[parameter][field]
        return self.state()


def check_groups(parameters: Mapping[str, nn.Parameter], train: TrainConfig) -> None:
    """A pattern of `lr_groups` that fits no trained parameter of the whole model is a mistake."""
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for pattern in train.lr_groups:
        if not any(fnmatch(name, pattern) for name in trained):
            raise UserMistake(f"train.lr_groups: {pattern!r} fits no trained parameter.")


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    train: TrainConfig,
    anatomy: Anatomy,
    *,
    partition: Partition | None = None,
    store: Store | None = None,
) -> NamedOptimizer:
    """The optimizer of the config over those `parameters` that are trained.

    With `partition` each replica updates its rows only; with `store` the state lives there between steps.
    """
    held = parameters if partition is None else partition.parameters
    trained = {name: parameter for name, parameter in held.items() if parameter.requires_grad}
    kinds = {train.optimizer.name: trained}
    if train.optimizer.name == "muon":
        # Muon is for matrices inside blocks; embedding, head, norms and biases learn by AdamW beside it.
        inside = anatomy.inside_blocks
        assert inside is not None, "checked before: muon needs blocks"
        matrices = {name: one for name, one in trained.items() if one.dim() == 2 and name.startswith(inside)}
        others = {name: one for name, one in trained.items() if name not in matrices}
        kinds = {"muon": matrices, "adamw": others}
    parts = [
        _make(name, some, train, store)
        for name, members in kinds.items()
        for some in ([members] if store is None else buckets(members))
        if some
    ]
    names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
    return NamedOptimizer(parts, names, partition, None if store is None else OffloadedState(store))


def _make(
    name: str, parameters: Mapping[str, nn.Parameter], train: TrainConfig, store: Store | None
) -> torch.optim.Optimizer:
    settings = train.optimizer
    groups = _groups(parameters, settings, train.lr_groups)
    # The fused CPU kernel rounds the tail of a tensor unlike its middle, so shards of it would differ in the last bit.
    fused = all(parameter.is_cuda for parameter in parameters.values())
    if name == "adamw":
        return torch.optim.AdamW(
            groups, lr=train.lr, betas=settings.betas, eps=settings.eps, fused=fused, foreach=not fused
        )
    if name == "sgd":
        optimizer = torch.optim.SGD(groups, lr=train.lr, momentum=settings.momentum, fused=fused, foreach=not fused)
        for parameter in parameters.values() if settings.momentum else ():
            # torch makes it in the first step, out of memory that it does not clear; a first step that is skipped
            # would leave it so. From zero the first step is the same.
            kept = torch.empty_like(parameter, requires_grad=False) if store is None else store.empty_like(parameter)
            optimizer.state[parameter]["momentum_buffer"] = kept.zero_()
        return optimizer
    if name == "lion":
        return Lion(groups, lr=train.lr, betas=settings.betas)
    assert name == "muon", name
    return torch.optim.Muon(groups, lr=train.lr, momentum=settings.momentum, adjust_lr_fn="match_rms_adamw")


def _groups(
    parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Parameters that share weight decay (none for vectors: norms and biases) and rate factor."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = settings.weight_decay if parameter.dim() >= 2 else 0.0
        factor = next((value for pattern, value in factors.items() if fnmatch(name, pattern)), 1.0)
        groups.setdefault((decay, factor), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "rate_factor": factor} for (decay, factor), members in groups.items()
    ]
