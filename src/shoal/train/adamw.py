"""AdamW in one pass over memory: clipping, the update and the rounded copies that are computed with, together.

The state has torch's names and shapes, so a checkpoint of either can be gone on with by the other. On CUDA a kernel of
our own does the work, and looks itself whether the step is usable: the host does not wait. `eight_bits` of a group
keeps the moments of its parameters in 8 bits (see eight_bits.py). What this file computes with plain torch operations
is what the kernel computes.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.mistakes import UserMistake
from shoal.models.pieces import local_tensor
from shoal.train import eight_bits
from shoal.train.eight_bits import FIRST, SCALES, SECOND

NO_COPIES: Mapping[Tensor, Tensor] = {}


@dataclass(frozen=True)
class Numbers:
    """What is the same for all parameters of a group in a step."""

    rate: float
    decay: float
    betas: tuple[float, float]
    eps: float

    @property
    def kept(self) -> float:
        """What weight decay leaves of a weight."""
        return 1 - self.rate * self.decay


@dataclass(frozen=True)
class Tensors:
    """This rank's part of a parameter and of all that its update reads or writes."""

    weight: Tensor
    gradient: Tensor
    state: dict[str, Tensor]
    correction: Tensor  # of the bias of the two moments in early steps: see `_corrections`
    copy: Tensor | None  # of the weight, in the type that is computed with

    @property
    def in_eight_bits(self) -> bool:
        return SCALES[FIRST] in self.state


# (one parameter's tensors, the group's numbers, whether the step is usable, what gradients are multiplied with)
Update = Callable[[Tensors, Numbers, Tensor, Tensor | None], None]


@cache
def find_kernel() -> Update | None:
    """The kernel, where there is Triton to compile it."""
    if find_spec("triton") is None:
        return None
    from shoal.train.adamw_kernel import update

    return update


class AdamW(Optimizer):
    """`step` is given what torch's has no room for."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        eight_bits: bool = False,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype` is that of moments which are not in 8 bits; None: the parameter's."""
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "eight_bits": eight_bits,
                "dtype": dtype,
            },
        )
        on_cuda = all(parameter.is_cuda for group in self.param_groups for parameter in group["params"])
        self.kernel = find_kernel() if on_cuda else None

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, usable: Tensor, factor: Tensor | None = None, copies: Mapping[Tensor, Tensor] = NO_COPIES
    ) -> None:
        """Update the parameters with their gradients times `factor`, and with them the `copies` (by parameter).

        Where `usable` is false nothing changes.
        """
        if self.kernel is None and not bool(usable):
            return
        update = self.kernel or _update
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {field: self._empty(parameter, field, group) for field in _fields(group)}
            steps = [self.state[parameter]["step"] for parameter in parameters]
            torch._foreach_add_(steps, [usable.to(steps[0])] * len(steps))  # given one tensor, the host would wait
            numbers = Numbers(float(group["lr"]), group["weight_decay"], group["betas"], group["eps"])
            corrections = _corrections(torch.stack(steps), numbers.betas)
            for parameter, correction in zip(parameters, corrections, strict=True):
                weight = local_tensor(parameter)
                if weight.numel() == 0:  # a rank may have no row of it
                    continue
                state = {field: local_tensor(value) for field, value in self.state[parameter].items()}
                gradient, copy = local_tensor(parameter.grad), copies.get(parameter)
                update(Tensors(weight, gradient, state, correction, copy), numbers, usable, factor)

    def empty_field(self, parameter: Tensor, field: str) -> Tensor:
        """A field of the state of one of our parameters, all zero."""
        (group,) = (group for group in self.param_groups if any(one is parameter for one in group["params"]))
        if field not in _fields(group):
            raise UserMistake(
                f"The checkpoint has a {field} of this optimizer, which keeps {', '.join(_fields(group))}."
            )
        return self._empty(parameter, field, group)

    def _empty(self, parameter: Tensor, field: str, group: dict[str, Any]) -> Tensor:
        if field == "step":
            return torch.zeros((), device=parameter.device)
        if group["eight_bits"]:
            return eight_bits.empty_field(parameter, field)
        return torch.zeros_like(parameter, dtype=group["dtype"], requires_grad=False)


def _fields(group: dict[str, Any]) -> tuple[str, ...]:
    """What is kept of a parameter of `group`."""
    return ("step", FIRST, SECOND, *SCALES.values()) if group["eight_bits"] else ("step", FIRST, SECOND)


def _corrections(steps: Tensor, betas: tuple[float, float]) -> tuple[Tensor, ...]:
    """For every count of steps: what the first moment is divided by, and the root of the second."""
    counts = steps.double()  # 1 - 0.999 has few digits in fp32
    first, second = (1 - beta**counts for beta in betas)
    return torch.stack([first, second.sqrt()], dim=1).float().unbind()


def _update(tensors: Tensors, numbers: Numbers, usable: Tensor, factor: Tensor | None) -> None:
    """One parameter, in plain operations of one rounding each: a part of a tensor comes out as in the whole."""
    weight, state = tensors.weight, tensors.state
    gradient = tensors.gradient.float()
    if factor is not None:
        gradient = gradient * factor
    if tensors.in_eight_bits:
        first = eight_bits.read_first(state[FIRST], state[SCALES[FIRST]])
        second = eight_bits.read_second(state[SECOND], state[SCALES[SECOND]])
    else:
        first, second = state[FIRST].float(), state[SECOND].float()
    first = first + (gradient - first) * (1 - numbers.betas[0])
    second = second * numbers.betas[1] + gradient * gradient * (1 - numbers.betas[1])
    first_correction, second_correction = tensors.correction
    direction = first / (second.sqrt() / second_correction + numbers.eps)
    weight.copy_(weight.float() * numbers.kept - direction * (numbers.rate / first_correction))
    if tensors.copy is not None:
        tensors.copy.copy_(weight)
    if tensors.in_eight_bits:
        eight_bits.write_first(first, state[FIRST], state[SCALES[FIRST]])
        eight_bits.write_second(second, state[SECOND], state[SCALES[SECOND]], state["step"])
    else:
        state[FIRST].copy_(first)
        state[SECOND].copy_(second)
