"""Lion (Chen et al., 2023): the sign of an interpolated momentum. PyTorch has no Lion."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shoal.optim.eight_bit import FIRST
from shoal.optim.fused import TO_NEAREST, FusedOptimizer, Hyperparameters, TensorLists, Update


class Lion(FusedOptimizer):
    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, TO_NEAREST)

    def find_kernel(self) -> Callable[[], Update]:
        from shoal.optim.lion_kernel import LionKernel

        return LionKernel

    def eager(self, tensors: TensorLists, hyperparameters: Hyperparameters, factor: Tensor | None) -> None:
        """Every operation rounds once, so that a shard has the same result as in the full tensor."""
        first, second = hyperparameters.betas
        together = zip(tensors.weights, tensors.gradients, tensors.state[FIRST], tensors.copies, strict=True)
        for weight, gradient, average, copy in together:
            gradient = gradient.float() if factor is None else gradient.float() * factor
            before = average.float()
            direction = (before + (gradient - before) * (1 - first)).sign()
            weight.copy_(weight.float() * hyperparameters.kept - direction * hyperparameters.lr)
            average.copy_(before + (gradient - before) * (1 - second))
            if copy is not None:
                copy.copy_(weight)

    def fields(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (FIRST,)

    def empty(self, parameter: Tensor, field: str, group: dict[str, Any]) -> Tensor:
        return torch.zeros_like(parameter, requires_grad=False)
