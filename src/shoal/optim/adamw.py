"""Fused AdamW: gradient clipping, the update and the cast to low-precision weights in one kernel.

The state has the names and shapes of `torch.optim.AdamW`, so each can load a checkpoint of the other. A group with
`eight_bits` keeps its moments in 8 bits (see eight_bit.py).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.optim import adamw_update, eight_bit
from shoal.optim.eight_bit import FIRST, SCALES, SECOND
from shoal.optim.fused import STEP, TO_NEAREST, FusedOptimizer, Hyperparameters, TensorLists, Update
from shoal.optim.rounding import StochasticRounding


class AdamW(FusedOptimizer):
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
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "eight_bits": eight_bits,
            "dtype": dtype,
        }
        super().__init__(params, defaults, rounding)

    def find_kernel(self) -> Callable[[], Update]:
        from shoal.optim.adamw_kernel import AdamWKernel

        return AdamWKernel

    def eager(self, tensors: TensorLists, hyperparameters: Hyperparameters, factor: Tensor | None) -> None:
        adamw_update.update(tensors, hyperparameters, factor)

    def fields(self, group: dict[str, Any]) -> tuple[str, ...]:
        return (STEP, FIRST, SECOND, *SCALES.values()) if group["eight_bits"] else (STEP, FIRST, SECOND)

    def empty(self, parameter: Tensor, field: str, group: dict[str, Any]) -> Tensor:
        if group["eight_bits"]:
            return eight_bit.empty_field(parameter, field)
        return torch.zeros_like(parameter, dtype=group["dtype"], requires_grad=False)
