"""The optimizer: parameter groups with weight decay and learning rate factors, and state by parameter name."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.catalogue.optimizers import find_optimizer
from shoal.config.schema import OptimizerConfig, TrainConfig
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy, read_anatomy
from shoal.models.emulate import emulated_matmuls
from shoal.models.tensor_slices import BLOCK, local_tensor, slice_mappings
from shoal.optim.adamw import NO_COPIES, TO_NEAREST, AdamW, find_kernel
from shoal.optim.eight_bit import is_quantized
from shoal.optim.lion import Lion
from shoal.optim.muon import Muon
from shoal.optim.offload import OffloadedState, Store, buckets
from shoal.optim.rounding import StochasticRounding, rounding_key
from shoal.optim.zero1 import Partition
from shoal.parallel.placement import Placement
from shoal.parallel.tensor import row_parallel_widths


class NamedOptimizer:
    """One or more torch optimizers over named parameters. The learning rate is given at every step."""

    def __init__(
        self,
        parts: list[torch.optim.Optimizer],
        names: Mapping[Tensor, str],
        partition: Partition | None = None,
        offloaded: OffloadedState | None = None,
        copies: Mapping[Tensor, Tensor] = NO_COPIES,
        emulated: frozenset[torch.dtype] = frozenset(),
    ) -> None:
        """`copies` are low-precision copies of parameters, which the update writes if `writes_copies`. Muon has bf16
        matmuls, which are computed in fp32 if bf16 is `emulated`."""
        self.parts = parts
        self.names = names
        self.partition = partition  # ZeRO-1: each replica updates its shard
        self.offloaded = offloaded
        self.emulated = emulated
        # AdamW's step takes the clipping factor, so gradients need not be multiplied with it before.
        self.takes_factor = all(isinstance(part, AdamW) for part in parts)
        # With ZeRO-1 a replica has only its shard of the new weights before the all-gather.
        self.writes_copies = self.takes_factor and partition is None and bool(copies)
        self.copies = copies if self.writes_copies else NO_COPIES

    def step(self, lr: float, usable: Tensor, factor: Tensor | None = None) -> None:
        """Update the weights with the gradients times `factor` (if `takes_factor`). If `usable` is false, neither
        weights nor optimizer state change."""
        assert factor is None or self.takes_factor
        for part in self.parts:
            for group in part.param_groups:
                group["lr"] = lr * group["lr_factor"]
        if self.partition is not None:
            self.partition.take_gradients()
        if all(_skips_on_device(part) for part in self.parts) or bool(usable):
            for part in self.parts:
                with nullcontext() if self.offloaded is None else self.offloaded.on_device(part):
                    self._step(part, usable, factor)
            if self.partition is not None:
                self.partition.all_gather_shards()

    def _step(self, part: torch.optim.Optimizer, usable: Tensor, factor: Tensor | None) -> None:
        # With CPU offload, parameters that are not sharded stay on the device.
        device = part.param_groups[0]["params"][0].device
        usable, factor = usable.to(device), None if factor is None else factor.to(device)
        if isinstance(part, AdamW):
            part.step(usable, factor, self.copies)
            return
        if _skips_on_device(part):
            part.found_inf = (~usable).float()  # type: ignore[attr-defined]
        with emulated_matmuls(self.emulated):
            part.step()

    def state(self) -> dict[str, Tensor]:
        """State tensors by 'field.parameter_name'."""
        return {
            f"{field}.{self.names[parameter]}": value
            for part in self.parts
            for parameter, fields in part.state.items()
            for field, value in fields.items()
        }

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]:
        """Allocate this rank's part of the state that `stored` (name → unsharded shape) describes, and return it as
        `state` does."""
        owners = {
            self.names[parameter]: (part, parameter)
            for part in self.parts
            for group in part.param_groups
            for parameter in group["params"]
        }
        for key, shape in stored.items():
            field, _, name = key.partition(".")
            if name not in owners:
                continue
            part, parameter = owners[name]
            value = _empty(part, parameter, field, shape)
            if placement.whole_shape(name, value) != tuple(shape):
                raise UserMistake(
                    f"{key} has shape {shape} in the checkpoint, but {placement.whole_shape(name, value)} in this run."
                )
            if value.dim() and self.offloaded is not None:
                value = self.offloaded.store.empty_like(value)
            part.state[parameter][field] = value
        for name, (part, parameter) in owners.items():  # state that the checkpoint does not have is dropped
            for field in [one for one in part.state.get(parameter, ()) if f"{one}.{name}" not in stored]:
                del part.state[parameter][field]
        return self.state()


def _skips_on_device(part: torch.optim.Optimizer) -> bool:
    """Whether the kernel reads the usable flag on the device, so that the host does not wait for it."""
    return isinstance(part, AdamW) or all(group.get("fused") for group in part.param_groups)


def _empty(part: torch.optim.Optimizer, parameter: Tensor, field: str, shape: tuple[int, ...]) -> Tensor:
    """A zero-filled state field of `parameter` with this unsharded shape."""
    if isinstance(part, AdamW):
        return part.empty_field(parameter, field)
    if shape:
        return torch.zeros_like(parameter, requires_grad=False)
    # A step counter: fused kernels read it on the device, the others on the host.
    return torch.zeros((), device=parameter.device if _skips_on_device(part) else "cpu")


def check_groups(parameters: Mapping[str, nn.Parameter], train: TrainConfig) -> None:
    """Every pattern of `lr_groups` must match a trained parameter."""
    trained = [name for name, parameter in parameters.items() if parameter.requires_grad]
    for pattern in train.lr_groups:
        if not any(fnmatch(name, pattern) for name in trained):
            raise UserMistake(f"train.lr_groups: {pattern!r} matches no trained parameter.")


def check_quantization_blocks(model: nn.Module, train: TrainConfig, degree: int) -> None:
    """Tensor parallelism must not split a quantization block of adamw8bit."""
    optimizer = find_optimizer(train.optimizer.name)
    if not optimizer.is_quantized or degree == 1:
        return
    parameters = dict(model.named_parameters())
    widths = {
        name: width
        for name, width in row_parallel_widths(model, read_anatomy(model)).items()
        if parameters[name].requires_grad and is_quantized(tuple(parameters[name].shape))
    }
    fitting = [
        one
        for one in range(1, degree + 1)
        if degree % one == 0 and (one == 1 or all(width % (one * BLOCK) == 0 for width in widths.values()))
    ]
    if fitting[-1] != degree:
        name = next(name for name, width in widths.items() if width % (degree * BLOCK))
        raise UserMistake(
            f"parallel.tp {degree} shards rows of {name} into {widths[name] // degree} elements, not a multiple of the "
            f"{optimizer.name} block of {BLOCK}; use parallel.tp {fitting[-1]}, or train.optimizer.name adamw."
        )


def make_optimizer(
    parameters: Mapping[str, nn.Parameter],
    train: TrainConfig,
    anatomy: Anatomy,
    *,
    placement: Placement | None = None,
    partition: Partition | None = None,
    store: Store | None = None,
    copies: Mapping[Tensor, Tensor] = NO_COPIES,
    emulated: frozenset[torch.dtype] = frozenset(),
    seed: int = 0,
) -> NamedOptimizer:
    """Make the optimizer of the config for those `parameters` that are trained.

    `placement` has their unsharded shapes. With `partition` each replica updates its shard only. With `store` the state
    is offloaded between steps. `copies` are low-precision copies of parameters to update with them. `emulated` are the
    dtypes whose matmuls are computed in fp32. `seed` is that of stochastic rounding.
    """
    held = parameters if partition is None else partition.parameters
    trained = {name: parameter for name, parameter in held.items() if parameter.requires_grad}
    optimizer = find_optimizer(train.optimizer.name)
    kinds = {optimizer.name: trained}
    if optimizer.elsewhere is not None:
        # Muon is for matrices inside blocks; AdamW updates embedding, head, norms and biases.
        inside = anatomy.inside_blocks
        assert inside is not None, "checked before: it needs blocks"
        matrices = {name: one for name, one in trained.items() if one.dim() == 2 and name.startswith(inside)}
        others = {name: one for name, one in trained.items() if name not in matrices}
        kinds = {optimizer.name: matrices, optimizer.elsewhere: others}
    whole = {} if placement is None else placement.shapes
    parts = [
        MAKERS[name](_Request(some, train, store, whole, placement, seed))
        for name, members in kinds.items()
        for alike in _alike(members)
        for some in ([alike] if store is None else buckets(alike))
        if some
    ]
    names: dict[Tensor, str] = {parameter: name for name, parameter in trained.items()}
    return NamedOptimizer(parts, names, partition, None if store is None else OffloadedState(store), copies, emulated)


def _alike(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """Group parameters that one foreach kernel accepts together: all sharded or none, on one device."""
    found: dict[tuple[bool, torch.device], dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        found.setdefault((isinstance(parameter, DTensor), parameter.device), {})[name] = parameter
    return list(found.values())


@dataclass(frozen=True)
class _Request:
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
        """The fused CPU kernel rounds the tail of a tensor differently, so shards would differ in the last bit."""
        return all(parameter.is_cuda for parameter in self.parameters.values())

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
        return _groups(self.parameters if some is None else some, self.settings, self.train.lr_groups)


class ShardedAdamW(torch.optim.AdamW):
    """AdamW that updates the local shards: elementwise operations on DTensors give the same, after much more work on
    the host."""

    def _init_group(self, group: dict[str, Any], *lists: Any) -> bool:
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        *sharded, _steps = lists
        for tensors in sharded:
            tensors[:] = [local_tensor(one) for one in tensors]
        return has_complex


def _adamw(given: _Request) -> torch.optim.Optimizer:
    lr, betas, eps, fused = given.train.lr, given.settings.betas, given.settings.eps, given.fused
    rounding = given.rounding
    if rounding or (fused and find_kernel() is not None):
        return AdamW(given.groups(), lr=lr, betas=betas, eps=eps, rounding=rounding)
    return ShardedAdamW(given.groups(), lr=lr, betas=betas, eps=eps, fused=fused, foreach=not fused)


def _adamw8bit(given: _Request) -> torch.optim.Optimizer:
    shapes = {name: given.whole.get(name, tuple(one.shape)) for name, one in given.parameters.items()}
    small = {name: one for name, one in given.parameters.items() if is_quantized(shapes[name])}
    large = {name: one for name, one in given.parameters.items() if name not in small}
    groups = [{**group, "eight_bits": some is small} for some in (small, large) for group in given.groups(some)]
    lr, betas, eps = given.train.lr, given.settings.betas, given.settings.eps
    return AdamW(groups, lr=lr, betas=betas, eps=eps, dtype=torch.float32, rounding=given.rounding)


def _sgd(given: _Request) -> torch.optim.Optimizer:
    momentum, fused, store = given.settings.momentum, given.fused, given.store
    optimizer = torch.optim.SGD(given.groups(), lr=given.train.lr, momentum=momentum, fused=fused, foreach=not fused)
    for parameter in given.parameters.values() if momentum else ():
        # PyTorch creates it uninitialized in the first step, and a skipped first step would leave it so. Starting
        # from zero gives the same first step.
        kept = torch.empty_like(parameter, requires_grad=False) if store is None else store.empty_like(parameter)
        optimizer.state[parameter]["momentum_buffer"] = kept.zero_()
    return optimizer


def _lion(given: _Request) -> torch.optim.Optimizer:
    return Lion(given.groups(), lr=given.train.lr, betas=given.settings.betas)


def _muon(given: _Request) -> torch.optim.Optimizer:
    return Muon(given.groups(), lr=given.train.lr, momentum=given.settings.momentum)


# By the names of `catalogue.optimizers`.
MAKERS: dict[str, Callable[[_Request], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "lion": _lion,
    "sgd": _sgd,
    "muon": _muon,
}


def _groups(
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
