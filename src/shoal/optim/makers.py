"""How each optimizer of `catalogue.optimizers` is made: torch's, or one of this folder."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from shoal.catalogue.optimizers import find_optimizer
from shoal.config.schema import OptimizerConfig, TrainConfig
from shoal.models.cross_entropy import has_kernel
from shoal.models.tensor_slices import local_tensor, slice_mappings
from shoal.optim.adamw import AdamW
from shoal.optim.eight_bit import is_quantized
from shoal.optim.fused import TO_NEAREST
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon
from shoal.optim.offload import Store
from shoal.optim.rounding import StochasticRounding, rounding_key
from shoal.parallel.placement import Placement


@dataclass(frozen=True)
class Request:
    """The parameters that one torch optimizer updates, and its settings."""

    parameters: Mapping[str, nn.Parameter]
    train: TrainConfig
    store: Store | None
    whole: Mapping[str, tuple[int, ...]]  # unsharded shapes
    placement: Placement | None
    seed: int

    @property
    def settings(self) -> OptimizerConfig:
        return self.train.optimizer

    @property
    def fused(self) -> bool:
        """The fused CPU kernel rounds the tail of a tensor differently, so shards would differ in the last bit. Weights
        that a GPU keeps in host memory take it nevertheless: it is four times as fast as one pass per operation."""
        trains_on_gpu = self.placement is not None and self.placement.parallel_dims.device.type == "cuda"
        return trains_on_gpu or all(parameter.is_cuda for parameter in self.parameters.values())

    @property
    def rounding(self) -> Mapping[Tensor, StochasticRounding]:
        """Of the parameters that are rounded stochastically."""
        settings = self.settings
        if settings.rounding == "nearest" or "rounding" not in find_optimizer(settings.name).options:
            return TO_NEAREST
        return {
            one: self._stochastic(name, one) for name, one in self.parameters.items() if one.dtype == torch.bfloat16
        }

    def _stochastic(self, name: str, parameter: nn.Parameter) -> StochasticRounding:
        local, placement = local_tensor(parameter), self.placement
        return StochasticRounding(
            rounding_key(self.seed, name),
            tuple(parameter.shape) if placement is None else placement.whole_shape(name, parameter),
            tuple(local.shape),
            slice_mappings(parameter, None) if placement is None else placement.slice_mappings(name, parameter),
            local.device,
        )

    def groups(self, some: Mapping[str, nn.Parameter] | None = None) -> list[dict[str, Any]]:
        return parameter_groups(self.parameters if some is None else some, self.settings, self.train.lr_groups)


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that updates the local shards: elementwise operations on DTensors give the same, after much more work on
    the host."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        *sharded, _steps = lists
        for tensors in sharded:
            tensors[:] = [local_tensor(one) for one in tensors]
        return has_complex


def _adamw(given: Request) -> torch.optim.Optimizer:
    lr, betas, eps, fused = given.train.lr, given.settings.betas, given.settings.eps, given.fused
    rounding = given.rounding
    if rounding or all(has_kernel(parameter) for parameter in given.parameters.values()):
        return AdamW(given.groups(), lr=lr, betas=betas, eps=eps, rounding=rounding)
    return ShardedAdamW(given.groups(), lr=lr, betas=betas, eps=eps, fused=fused, foreach=not fused)


def _adamw8bit(given: Request) -> torch.optim.Optimizer:
    shapes = {name: given.whole.get(name, tuple(one.shape)) for name, one in given.parameters.items()}
    small = {name: one for name, one in given.parameters.items() if is_quantized(shapes[name])}
    large = {name: one for name, one in given.parameters.items() if name not in small}
    groups = [{**group, "eight_bits": some is small} for some in (small, large) for group in given.groups(some)]
    lr, betas, eps = given.train.lr, given.settings.betas, given.settings.eps
    return AdamW(groups, lr=lr, betas=betas, eps=eps, dtype=torch.float32, rounding=given.rounding)


def _sgd(given: Request) -> torch.optim.Optimizer:
    momentum, fused, store = given.settings.momentum, given.fused, given.store
    optimizer = torch.optim.SGD(given.groups(), lr=given.train.lr, momentum=momentum, fused=fused, foreach=not fused)
    for parameter in given.parameters.values() if momentum else ():
        # PyTorch creates it uninitialized in the first step, and a skipped first step would leave it so. Starting
        # from zero gives the same first step.
        kept = torch.empty_like(parameter, requires_grad=False) if store is None else store.empty_like(parameter)
        optimizer.state[parameter]["momentum_buffer"] = kept.zero_()
    return optimizer


def _lion(given: Request) -> torch.optim.Optimizer:
    return Lion(given.groups(), lr=given.train.lr, betas=given.settings.betas)


def _muon(given: Request) -> torch.optim.Optimizer:
    return Muon(given.groups(), lr=given.train.lr, momentum=given.settings.momentum)


def parameter_groups(
    parameters: Mapping[str, nn.Parameter], settings: OptimizerConfig, factors: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Group parameters by weight decay (none for vectors: norms and biases) and learning rate factor."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        decay = settings.weight_decay if parameter.dim() >= 2 else 0.0
        factor = next((value for pattern, value in factors.items() if fnmatch(name, pattern)), 1.0)
        groups.setdefault((decay, factor), []).append(parameter)
    return [
        {"params": members, "weight_decay": decay, "lr_factor": factor} for (decay, factor), members in groups.items()
    ]


# By the names of `catalogue.optimizers`.
MAKERS: dict[str, Callable[[Request], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}
