"""Fused AdamW: gradient clipping, the update and the cast to low-precision weights in one kernel.

The state has the names and shapes of `torch.optim.AdamW`, so each can load a checkpoint of the other. On CUDA a Triton
kernel reads the `usable` flag on the device, so that the host does not wait. A group with `eight_bits` keeps its
moments in 8 bits (see eight_bit.py).
"""

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.mistakes import UserMistake
from shoal.models.tensor_slices import local_tensor
from shoal.optim import adamw_update, eight_bit
from shoal.optim.adamw_update import Hyperparameters, Tensors, Update
from shoal.optim.eight_bit import FIRST, SCALES, SECOND
from shoal.optim.rounding import StochasticRounding

NO_COPIES: Mapping[Tensor, Tensor] = {}
TO_NEAREST: Mapping[Tensor, StochasticRounding] = {}


@cache
def find_kernel() -> Update | None:
    """The Triton kernel, if Triton is installed."""
    if find_spec("triton") is None:
        return None
    from shoal.optim.adamw_kernel import update

    return update


class AdamW(Optimizer):
    """AdamW whose `step` takes a usable flag, a gradient factor and low-precision copies."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        eight_bits: bool = False,
        dtype: torch.dtype | None = None,
        rounding: Mapping[Tensor, StochasticRounding] = TO_NEAREST,
    ) -> None:
        """`dtype` is that of moments that are not in 8 bits; None: the parameter's. `rounding`: of bf16 parameters that
        are not rounded to nearest."""
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
        self.rounding = rounding

    @torch.no_grad()
    def step(  # type: ignore[override]
        self, usable: Tensor, factor: Tensor | None = None, copies: Mapping[Tensor, Tensor] = NO_COPIES
    ) -> None:
        """Update the parameters with their gradients times `factor`, and write their low-precision `copies`.

        If `usable` is false, nothing changes.
        """
        if self.kernel is None and not bool(usable):
            return
        update = self.kernel or adamw_update.update
        for group in self.param_groups:
            parameters = [one for one in group["params"] if one.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {field: self._empty(parameter, field, group) for field in _fields(group)}
            steps = [self.state[parameter]["step"] for parameter in parameters]
            torch._foreach_add_(steps, [usable.to(steps[0])] * len(steps))  # a single tensor would make the host wait
            hyperparameters = Hyperparameters(float(group["lr"]), group["weight_decay"], group["betas"], group["eps"])
            corrections = _corrections(torch.stack(steps), hyperparameters.betas)
            for parameter, correction in zip(parameters, corrections, strict=True):
                weight = local_tensor(parameter)
                if weight.numel() == 0:  # this rank's shard may be empty
                    continue
                state = {field: local_tensor(value) for field, value in self.state[parameter].items()}
                gradient, copy = local_tensor(parameter.grad), copies.get(parameter)
                tensors = Tensors(weight, gradient, state, correction, copy, self.rounding.get(parameter))
                update(tensors, hyperparameters, usable, factor)

    def empty_field(self, parameter: Tensor, field: str) -> Tensor:
        """A zero-filled state field of one of the parameters."""
        (group,) = (group for group in self.param_groups if any(one is parameter for one in group["params"]))
        if field not in _fields(group):
            raise UserMistake(
                f"The checkpoint has the optimizer state {field}, but this optimizer has {', '.join(_fields(group))}."
            )
        return self._empty(parameter, field, group)

    def _empty(self, parameter: Tensor, field: str, group: dict[str, Any]) -> Tensor:
        if field == "step":
            return torch.zeros((), device=parameter.device)
        if group["eight_bits"]:
            return eight_bit.empty_field(parameter, field)
        return torch.zeros_like(parameter, dtype=group["dtype"], requires_grad=False)


def _fields(group: dict[str, Any]) -> tuple[str, ...]:
    """The state fields of a parameter of `group`."""
    return ("step", FIRST, SECOND, *SCALES.values()) if group["eight_bits"] else ("step", FIRST, SECOND)


def _corrections(steps: Tensor, betas: tuple[float, float]) -> tuple[Tensor, ...]:
    """Bias corrections for every step count: of the first moment, and of the square root of the second."""
    counts = steps.double()  # 1 - 0.999 loses precision in fp32
    first, second = (1 - beta**counts for beta in betas)
    return torch.stack([first, second.sqrt()], dim=1).float().unbind()
