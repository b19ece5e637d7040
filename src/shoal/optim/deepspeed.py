"""The optimizer under DeepSpeed's ZeRO: torch's, or ours as torch's, which DeepSpeed calls with one-dimensional shards.

ZeRO flattens the parameters of a group into one tensor and shards that, so it takes every optimizer that updates
elements independently of each other, and none that needs whole matrices (Muon) or blocks of a parameter (8-bit AdamW).
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shoal.config.schema import TrainConfig
from shoal.mistakes import UserMistake
from shoal.optim.lion import Lion
from shoal.optim.makers import parameter_groups
from shoal.optim.optimizer import NamedOptimizer
from shoal.parallel.placement import Placement
from shoal.parallel.zero_engine import STEP, ZeroEngine


class PlainLion(Lion):
    """Lion with the `step` of a torch optimizer."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.kernel = None  # made for the parameters that it was given, not for DeepSpeed's shards
        super().step(torch.ones((), dtype=torch.bool))


def torch_optimizer(
    parameters: Mapping[str, nn.Parameter], train: TrainConfig, *, device: torch.device
) -> torch.optim.Optimizer:
    """The optimizer of the config, for DeepSpeed to call."""
    settings = train.optimizer
    trained = {name: one for name, one in parameters.items() if one.requires_grad}
    groups = parameter_groups(trained, settings, train.lr_groups)
    # One fused kernel on a GPU, and on its host, where the state is offloaded.
    fused = device.type == "cuda"
    if settings.name == "adamw":
        return torch.optim.AdamW(
            groups, lr=train.lr, betas=settings.betas, eps=settings.eps, fused=fused, foreach=not fused
        )
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=train.lr, momentum=settings.momentum, fused=fused, foreach=not fused)
    assert settings.name == "lion", "the config refuses others"
    return PlainLion(groups, lr=train.lr, betas=settings.betas)


def new_state(optimizer: torch.optim.Optimizer, shard: Tensor) -> dict[str, Tensor]:
    """The state of a shard before its first step, as the optimizer itself would make it."""
    names = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq"), PlainLion: ("exp_avg",)}.get(type(optimizer))
    if names is None:
        names = ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    state = {name: torch.zeros_like(shard, requires_grad=False) for name in names}
    if isinstance(optimizer, torch.optim.AdamW):
        state[STEP] = torch.zeros((), device=shard.device if optimizer.defaults["fused"] else "cpu")
    return state


class ZeroOptimizer(NamedOptimizer):
    """The optimizer state in DeepSpeed's engine, by parameter name."""

    def __init__(self, zero: ZeroEngine) -> None:
        super().__init__([zero.optimizer], {parameter: name for name, parameter in zero.trained.items()})
        self.zero = zero

    def step(self, lr: float | None, usable: Tensor, factor: Tensor | None = None) -> None:
        raise AssertionError("DeepSpeed's engine clips and updates in its own step")

    def state(self) -> dict[str, Tensor]:
        """This rank's rows, as they were taken out for a checkpoint or loaded from one."""
        return self.zero.state

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]:
        zero = self.zero
        zero.state = {}
        for key, shape in stored.items():
            field, _, name = key.partition(".")
            if name not in zero.trained:
                continue
            if shape and shape != zero.shapes[name]:
                raise UserMistake(f"{key} has shape {shape} in the checkpoint, but {zero.shapes[name]} in this run.")
            zero.state[key] = zero.empty(name, field)
        zero.state_waits = bool(zero.state)
        return zero.state
