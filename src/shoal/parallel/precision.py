"""What a precision's name means, and the low-precision copies of the weights that mixed precision computes with.

`bf16-mixed` is one thing whatever the strategy. fp32 weights are what is trained. Matrices are multiplied as bf16
copies, and their gradients leave the backward pass in bf16 and become fp32 before they are added or reduced: FSDP2 does
this by its own policy; where there is no FSDP, `ComputeCopies` does the same sums in the same order. Vectors, which are
norms and biases, have no copies: a norm's weight is near one, where numbers of bf16 are further apart than many steps
move it. (A bias is rounded when a matrix adds it.) What goes from block to block is fp32 too, so that small additions
to it are not lost. All this is as autocast has it, but for matrices, which are rounded once a step and not whenever
they are used.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.models.anatomy import Anatomy
from shoal.models.weights import parameter_slots
from shoal.parallel.patch import patch
from shoal.parallel.plans import PLANS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """dtypes of a run: of the weights that are trained, of the compute, of gradients while they are reduced."""

    weights: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    scaled: bool  # fp16 gradients underflow unless the loss is scaled

    @property
    def mixed(self) -> bool:
        return self.weights != self.compute

    @property
    def stream(self) -> torch.dtype:
        """Of what goes from block to block."""
        return self.weights

    def is_rounded(self, parameter: Tensor) -> bool:
        """Whether a copy of `parameter` is computed with."""
        return self.mixed and parameter.dim() >= 2


def read_precision(name: str, reduce_dtype: str) -> Precision:
    if name == "32-true":
        return Precision(torch.float32, torch.float32, torch.float32, scaled=False)
    if name == "bf16-true":
        return Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, scaled=False)
    # fp8 is bf16-mixed but for the products inside blocks: see parallel.float8.
    compute = {"bf16-mixed": torch.bfloat16, "fp8": torch.bfloat16, "16-mixed": torch.float16}[name]
    return Precision(torch.float32, compute, DTYPES[reduce_dtype], scaled=name == "16-mixed")


class _ThroughCopy(torch.autograd.Function):
    """Forward: the copy. Backward: the copy's gradient, in the dtype of the weight's, goes to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = weight.grad_dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.to(ctx.dtype), None


def cast_norm_outputs(model: Any, anatomy: Anatomy, compute: torch.dtype) -> None:
    """Let norms that matrices read give what those compute with: else each matrix would round it anew, and keep it, and
    tensor-parallel ranks exchange twice the bytes. In place; for families whose norms we know, and for the last."""
    plan = PLANS.get(model.config.model_type)
    before_matrices = plan.norms if plan is not None else ()
    norms = [block.get_submodule(name) for block in anatomy.block_modules(model) for name in before_matrices]
    if anatomy.final_norm is not None and anatomy.linear_head:
        norms += [one for one in [model.get_submodule(anatomy.final_norm)] if one._parameters]  # or another stage's
    for norm in norms:
        patch(norm, _Rounded, compute=compute)


class _Rounded:
    compute: torch.dtype

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        result: Tensor = super().forward(*inputs, **named)  # type: ignore[misc]
        return result.to(self.compute)


class _TakesCopies:
    """A module whose copies are put in place when it is called. Outside of what is compiled."""

    take_copies: Callable[[], None]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.take_copies()
        return super().__call__(*inputs, **named)  # type: ignore[misc]


class ComputeCopies(nn.Module):
    """Runs `inner` with low-precision copies of its matrices, made once a step by `refresh`.

    Autograd goes back in the order in which it came, and hands a gradient on from the copy to the weight when it comes
    to where the copy was put in place. That is when the first module of a unit is called, for the unit's parameters: a
    block's gradients are whole, and on their way to other ranks, before the backward pass enters the block before it.
    """

    def __init__(self, inner: nn.Module, precision: Precision, units: Sequence[Sequence[nn.Module]] = ()) -> None:
        super().__init__()
        slots = parameter_slots(inner)
        self.inner = inner
        # Registered here too: after the first forward the copies stand in the places of `inner`.
        self.everything = nn.ParameterList(slots)
        self.weights = [weight for weight in slots if precision.is_rounded(weight)]
        self.places = [slots[weight] for weight in self.weights]
        self.copies = [torch.empty_like(weight, dtype=precision.compute) for weight in self.weights]
        self.refresh()
        unit_of: dict[nn.Module, nn.Module | None] = {}
        for unit in units:
            for inside in (one for root in unit for one in root.modules()):
                unit_of[inside] = unit[0] if unit_of.get(inside, unit[0]) is unit[0] else None
        parts: dict[nn.Module | None, list[int]] = {}
        for number, places in enumerate(self.places):
            first = {unit_of.get(owner) for owner, _ in places}
            # One that several units share is there from the start, as are those of none.
            parts.setdefault(first.pop() if len(first) == 1 else None, []).append(number)
        self.from_the_start = parts.pop(None, [])
        for module, numbers in parts.items():
            assert module is not None
            patch(module, _TakesCopies, take_copies=partial(self._take, numbers))

    @torch.no_grad()
    def refresh(self) -> None:
        """After a step or a load: round the weights into the copies."""
        torch._foreach_copy_(self.copies, [weight.detach() for weight in self.weights])

    def keep_small_gradients(self) -> None:
        """Keep gradients as they leave the backward pass. Nothing is lost where none is added to them, and whoever
        reads them computes in fp32: a gradient as wide as its weight would be the same numbers in twice the memory."""
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if weight.requires_grad:
                weight.grad_dtype = copy.dtype

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights that are trained, also while copies stand in their places."""
        return iter(self.everything)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        self._take(self.from_the_start)
        return self.inner(*inputs, **named)

    def _take(self, numbers: list[int]) -> None:
        """Put copies in place. There they stay: recomputation in the backward pass needs them."""
        for number in numbers:
            weight, copy = self.weights[number], self.copies[number]
            routed: Any = copy
            if weight.requires_grad:
                routed = _ThroughCopy.apply(weight, copy)  # type: ignore[no-untyped-call]
            for module, name in self.places[number]:
                module._parameters[name] = routed
