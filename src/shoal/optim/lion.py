"""Lion (Chen et al., 2023): the sign of an interpolated momentum. PyTorch has no Lion."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.models.tensor_slices import local_tensor


class Lion(Optimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Lion takes no closure"
        for group in self.param_groups:
            first, second = group["betas"]
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            # The update is elementwise, so each rank updates its shard; DTensor does not support all these operations.
            gradients = [local_tensor(parameter.grad) for parameter in parameters]
            averages = [local_tensor(self.state[parameter]["exp_avg"]) for parameter in parameters]
            weights = [local_tensor(parameter) for parameter in parameters]
            updates = torch._foreach_lerp(averages, gradients, 1 - first)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(weights, updates, alpha=-group["lr"])
            torch._foreach_lerp_(averages, gradients, 1 - second)
