"""The optimizer: one or more torch optimizers over named parameters, and their state by parameter name."""

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.catalogue.optimizers import find_optimizer
from shoal.config.schema import TrainConfig
from shoal.mistakes import UserMistake
from shoal.models.anatomy import Anatomy
from shoal.models.emulate import emulated_matmuls
from shoal.optim.fused import NO_COPIES, FusedOptimizer
from shoal.optim.makers import MAKERS, Request
from shoal.optim.offload import OffloadedState, Store, buckets
from shoal.optim.zero1 import Partition
from shoal.parallel.placement import Placement


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
        # If the step takes the clipping factor, gradients need not be multiplied with it before.
        self.takes_factor = all(_skips_on_device(part) for part in parts)
        # With ZeRO-1 a replica has only its shard of the new weights before the all-gather.
        self.own_kernels = all(isinstance(part, FusedOptimizer) for part in parts)
        self.writes_copies = self.own_kernels and partition is None and bool(copies)
        self.copies = copies if self.writes_copies else NO_COPIES

    def step(self, lr: float | None, usable: Tensor, factor: Tensor | None = None) -> None:
        """Update the weights with the gradients times `factor` (if `takes_factor`). If `usable` is false, neither
        weights nor optimizer state change. Without `lr` each parameter group keeps its own."""
        assert factor is None or self.takes_factor
        for part in self.parts:
            for group in part.param_groups if lr is not None else ():
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
        if isinstance(part, FusedOptimizer):
            part.step(usable, factor, self.copies)
            return
        if _skips_on_device(part):
            part.found_inf = (~usable).float()  # type: ignore[attr-defined]
            part.grad_scale = None if factor is None else factor.reciprocal()  # type: ignore[attr-defined]
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
    """Whether the kernel reads the usable flag on the device, so that the host does not wait for it, and the factor."""
    return isinstance(part, FusedOptimizer) or all(group.get("fused") for group in part.param_groups)


def _empty(part: torch.optim.Optimizer, parameter: Tensor, field: str, shape: tuple[int, ...]) -> Tensor:
    """A zero-filled state field of `parameter` with this unsharded shape."""
    if isinstance(part, FusedOptimizer):
        return part.empty_field(parameter, field)
    if shape:
        return torch.zeros_like(parameter, requires_grad=False)
    # A step counter: fused and capturable kernels read it on the device, the others on the host.
    on_device = _skips_on_device(part) or all(group.get("capturable") for group in part.param_groups)
    return torch.zeros((), device=parameter.device if on_device else "cpu")


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
        MAKERS[name](Request(some, train, store, whole, placement, seed))
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
