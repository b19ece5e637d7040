"""AdamW in one pass over memory: clipping, the update and the rounded copies that are computed with, together.

The state has torch's names and shapes, so a checkpoint of either can be gone on with by the other. On CUDA a kernel of
our own does the work, and looks itself whether the step is usable: the host does not wait. `eight_bits` of a group
keeps the moments of its parameters in 8 bits (see eight_bit.py).
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
from shoal.optim.adamw_update import Numbers, Tensors, Update
from shoal.optim.eight_bit import FIRST, SCALES, SECOND

NO_COPIES: Mapping[Tensor, Tensor] = {}


@cache
def find_kernel() -> Update | None:
    """The kernel, where there is Triton to compile it."""
    if find_spec("triton") is None:
        return None
    from shoal.optim.adamw_kernel import update

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
        update = self.kernel or adamw_update.update
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
            return eight_bit.empty_field(parameter, field)
        return torch.zeros_like(parameter, dtype=group["dtype"], requires_grad=False)


def _fields(group: dict[str, Any]) -> tuple[str, ...]:
    """What is kept of a parameter of `group`."""
    return ("step", FIRST, SECOND, *SCALES.values()) if group["eight_bits"] else ("step", FIRST, SECOND)


def _corrections(steps: Tensor, betas: tuple[float, float]) -> tuple[Tensor, ...]:
    """For every count of steps: what the first moment is divided by, and the root of the second."""
    counts = steps.double()  # 1 - 0.999 has few digits in fp32
    first, second = (1 - beta**counts for beta in betas)
    return torch.stack([first, second.sqrt()], dim=1).float().unbind()
