"""What AdamW and Lion have in common: a step that updates all tensors of a parameter group at once.

The step takes a usable flag and a gradient factor as device tensors, and low-precision copies to write with the
weights. On CUDA a Triton kernel reads the flag, so that the host does not wait, and a group takes a handful of
launches; without one, eager operations update one tensor after another.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.mistakes import UserMistake
from shoal.models.cross_entropy import has_kernel
from shoal.models.tensor_slices import local_tensors
from shoal.optim.rounding import StochasticRounding

NO_COPIES: Mapping[Tensor, Tensor] = {}
TO_NEAREST: Mapping[Tensor, StochasticRounding] = {}
STEP = "step"


@dataclass(frozen=True)
class Hyperparameters:
    """The values of a parameter group in one step."""

    lr: float
    decay: float
    betas: tuple[float, float]
    eps: float = 0.0

    @property
    def kept(self) -> float:
        """The factor that weight decay multiplies a weight with."""
        return 1 - self.lr * self.decay


@dataclass(frozen=True)
class TensorLists:
    """The local shards of the parameters of a group, which may be empty, and all that their update reads or writes."""

    weights: list[Tensor]
    gradients: list[Tensor]
    state: dict[str, list[Tensor]]  # without step counters
    copies: list[Tensor | None]  # low-precision copies of the weights
    rounding: list[StochasticRounding | None]  # None: the weight is rounded to nearest
    steps: Tensor | None  # the step counters of all parameters, if the optimizer has any


# (the group's tensors, its hyperparameters, usable flag, gradient factor)
Update = Callable[[TensorLists, Hyperparameters, Tensor, Tensor | None], None]


class FusedOptimizer(Optimizer):
    """An optimizer whose `step` takes a usable flag, a gradient factor and low-precision copies."""

    def __init__(
        self, params: Iterable[Any], defaults: dict[str, Any], rounding: Mapping[Tensor, StochasticRounding]
    ) -> None:
        super().__init__(params, defaults)
        on_cuda = all(has_kernel(parameter) for group in self.param_groups for parameter in group["params"])
        # Makes the update of a parameter group on the device.
        self.kernel = self.find_kernel() if on_cuda else None
        self.rounding = rounding
        self._updates: dict[int, Update] = {}  # by the index of the group
        self._steps: dict[int, tuple[Tensor, list[Tensor]]] = {}  # of a group, as one tensor and as views of it

    def find_kernel(self) -> Callable[[], Update]:
        """The Triton kernel; Triton is installed."""
        raise NotImplementedError

    def eager(self, tensors: TensorLists, hyperparameters: Hyperparameters, factor: Tensor | None) -> None:
        """The same in PyTorch operations."""
        raise NotImplementedError

    def fields(self, group: dict[str, Any]) -> tuple[str, ...]:
        """The state fields of a parameter of `group`."""
        raise NotImplementedError

    def empty(self, parameter: Tensor, field: str, group: dict[str, Any]) -> Tensor:
        """A zero-filled state field that is no step counter."""
        raise NotImplementedError

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, usable: Tensor, factor: Tensor | None = None, copies: Mapping[Tensor, Tensor] = NO_COPIES
    ) -> None:
        """Update the parameters with their gradients times `factor`, and write their low-precision `copies`.

        If `usable` is false, nothing changes.
        """
        if self.kernel is None and not bool(usable):
            return
        for index, group in enumerate(self.param_groups):
            parameters = [one for one in group["params"] if one.grad is not None]
            if not parameters:
                continue
            tensors = self._collect(index, group, parameters, copies)
            if tensors.steps is not None:
                tensors.steps.add_(usable)
            values = Hyperparameters(float(group["lr"]), group["weight_decay"], group["betas"], group.get("eps", 0.0))
            if self.kernel is None:
                self.eager(tensors, values, factor)
                continue
            if index not in self._updates:
                self._updates[index] = self.kernel()
            self._updates[index](tensors, values, usable, factor)

    def empty_field(self, parameter: Tensor, field: str) -> Tensor:
        """A zero-filled state field of one of the parameters."""
        (group,) = (group for group in self.param_groups if any(one is parameter for one in group["params"]))
        if field not in self.fields(group):
            raise UserMistake(
                f"The checkpoint has the optimizer state {field}, but this optimizer has "
                f"{', '.join(self.fields(group))}."
            )
        return self._empty(parameter, field, group)

    def _empty(self, parameter: Tensor, field: str, group: dict[str, Any]) -> Tensor:
        return torch.zeros((), device=parameter.device) if field == STEP else self.empty(parameter, field, group)

    def _collect(
        self, index: int, group: dict[str, Any], parameters: list[Tensor], copies: Mapping[Tensor, Tensor]
    ) -> TensorLists:
        fields = self.fields(group)
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state.update({field: self._empty(parameter, field, group) for field in fields})
        rounding = self.rounding
        return TensorLists(
            weights=local_tensors(parameters),
            gradients=local_tensors([one.grad for one in parameters]),  # type: ignore[misc]
            state={field: local_tensors([one[field] for one in states]) for field in fields if field != STEP},
            copies=[copies.get(one) for one in parameters] if copies else [None] * len(parameters),
            rounding=[rounding.get(one) for one in parameters] if rounding else [None] * len(parameters),
            steps=self._step_counters(index, states) if STEP in fields else None,
        )

    def _step_counters(self, index: int, states: list[dict[str, Tensor]]) -> Tensor:
        """The step counters in one tensor, so that one kernel increments all. They become views of it."""
        steps, views = self._steps.get(index, (None, []))
        if steps is None or len(views) != len(states) or not all(map(is_, views, [one[STEP] for one in states])):
            steps = torch.stack([one[STEP] for one in states])
            views = list(steps.unbind())
            for state, view in zip(states, views, strict=True):
                state[STEP] = view
            self._steps[index] = steps, views
        return steps
