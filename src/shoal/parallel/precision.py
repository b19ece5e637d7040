"""The dtypes of each `train.precision`, and the low-precision compute copies of mixed precision.

`bf16-mixed` means the same under every strategy. The optimizer updates fp32 master weights. Matmuls use bf16 copies of
the matrices; their gradients leave the backward pass in bf16 and are cast to fp32 before they are accumulated or
reduced. FSDP2 does this with its mixed precision policy; without FSDP, `ComputeCopies` does the same sums in the same
order. Vectors (norms and biases) have no copies: a norm's weight is close to one, where the spacing of bf16 values is
larger than many optimizer updates. (A bias is cast where a matmul adds it.) The residual stream is fp32 too, so that
small updates to it are not lost. This matches autocast, except that matrices are cast once per step and not at every
use.

With an adapter the base model is frozen, so it needs no master weights: all of it is held in the compute dtype, as in a
model that is only run, and the residual stream has that dtype too. Master weights and compute copies are the adapter's.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shoal.catalogue.families import PLANS
from shoal.models.anatomy import Anatomy
from shoal.models.slots import parameter_slots
from shoal.parallel.patch import patch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """The dtypes of a run: of the master weights, of the compute, and of gradient reduction."""

    weights: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    scaled: bool  # fp16 gradients underflow without loss scaling
    frozen_base: bool = False  # an adapter is trained

    @property
    def mixed(self) -> bool:
        return self.weights != self.compute

    @property
    def stream(self) -> torch.dtype:
        """The dtype of the residual stream."""
        return self.compute if self.frozen_base else self.weights

    @property
    def autocast(self) -> torch.dtype | None:
        """The dtype of matmuls whose inputs have another one; None: there are none."""
        return self.compute if self.mixed and not self.frozen_base else None

    @property
    def frozen(self) -> torch.dtype:
        """The dtype of parameters that are not trained."""
        return self.compute if self.frozen_base else self.weights

    @property
    def low(self) -> "Precision":
        """The same without master weights, which DeepSpeed's engine keeps for itself."""
        return replace(self, weights=self.compute)

    def has_compute_copy(self, parameter: Tensor) -> bool:
        """Whether the forward pass uses a low-precision copy of `parameter`."""
        return self.mixed and (parameter.requires_grad if self.frozen_base else parameter.dim() >= 2)

    def is_replicated(self, parameter: Tensor) -> bool:
        """Whether FSDP leaves `parameter` whole: a unit is all-gathered in one dtype, and vectors stay in fp32."""
        return self.autocast is not None and parameter.dim() < 2


def read_precision(name: str, reduce_dtype: str, *, adapter: bool = False) -> Precision:
    found = _read_precision(name, reduce_dtype)
    return replace(found, frozen_base=True) if adapter else found


def _read_precision(name: str, reduce_dtype: str) -> Precision:
    if name == "32-true":
        return Precision(torch.float32, torch.float32, torch.float32, scaled=False)
    if name == "bf16-true":
        return Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, scaled=False)
    # fp8 is bf16-mixed with float8 matmuls inside blocks: see parallel.float8.
    compute = {"bf16-mixed": torch.bfloat16, "fp8": torch.bfloat16, "16-mixed": torch.float16}[name]
    return Precision(torch.float32, compute, DTYPES[reduce_dtype], scaled=name == "16-mixed")


class _ThroughCopy(torch.autograd.Function):
    """Forward: the copy. Backward: the copy's gradient, cast to a weight's grad_dtype, goes to the weight; with several
    weights, whose copies are rows of one matrix, each has its rows."""

    @staticmethod
    def forward(ctx: Any, copy: Tensor, *weights: Tensor) -> Tensor:
        ctx.dtypes = [one.grad_dtype for one in weights]
        ctx.rows = [len(one) for one in weights] if len(weights) > 1 else None
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        parts = [gradient] if ctx.rows is None else torch.split(gradient, ctx.rows)
        return None, *(part.to(dtype) for part, dtype in zip(parts, ctx.dtypes, strict=True))


@dataclass(frozen=True)
class Packed:
    """Layers whose copies are one matrix: the `packed_weight` of `owner`, which multiplies by it."""

    owner: nn.Module
    layers: Sequence[nn.Linear]


@dataclass(frozen=True)
class _Copy:
    """A copy, the weights that it is of, and the slots that hold it while it is installed."""

    tensor: Tensor
    weights: Sequence[nn.Parameter]
    slots: Sequence[tuple[nn.Module, str]]

    def install(self) -> None:
        routed: Any = self.tensor
        if self.weights[0].requires_grad:
            routed = _ThroughCopy.apply(self.tensor, *self.weights)  # type: ignore[no-untyped-call]
        for module, name in self.slots:
            module._parameters[name] = routed

    def uninstall(self) -> None:
        for module, name in self.slots:
            module._parameters[name] = self.weights[0] if len(self.weights) == 1 else None


def cast_norm_outputs(model: Any, anatomy: Anatomy, compute: torch.dtype) -> None:
    """Make norms that feed matmuls return `compute`. Otherwise each matmul would cast and save its own copy, and
    tensor-parallel ranks would communicate twice the bytes. In place; for families with a plan, and for the final norm.
    """
    plan = PLANS.get(model.config.model_type)
    before_matmuls = plan.norms if plan is not None else ()
    norms = [block.get_submodule(name) for block in anatomy.block_modules(model) for name in before_matmuls]
    if anatomy.final_norm is not None and anatomy.linear_head:
        norms += [one for one in [model.get_submodule(anatomy.final_norm)] if one._parameters]  # none: on another stage
    for norm in norms:
        patch(norm, _CastOutput, compute=compute)


class _CastOutput:
    compute: torch.dtype

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        result: Tensor = super().forward(*inputs, **named)  # type: ignore[misc]
        return result.to(self.compute)


class _InstallsCopies:
    """A module that installs its unit's copies when it is called, outside of the compiled graph."""

    install_copies: Callable[[], None]

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        self.install_copies()
        return super().__call__(*inputs, **named)  # type: ignore[misc]


class ComputeCopies(nn.Module):
    """Runs `inner` with low-precision copies of its matrices, refreshed once per step by `refresh`.

    The backward pass visits nodes in reverse order, and passes a gradient from a copy to its weight at the point where
    the copy was installed. For the parameters of a unit that is the call of the unit's first module: a block's
    gradients are complete, and DDP starts to reduce them, before the backward pass enters the previous block.
    """

    def __init__(
        self,
        inner: nn.Module,
        precision: Precision,
        units: Sequence[Sequence[nn.Module]] = (),
        packed: Sequence[Packed] = (),
    ) -> None:
        super().__init__()
        slots = parameter_slots(inner.modules())
        self.inner = inner
        # Registered here too: after the first forward pass the slots of `inner` hold the copies.
        self.everything = nn.ParameterList(slots)
        self.weights = [weight for weight in slots if precision.has_compute_copy(weight)]
        self.copies = [torch.empty_like(weight, dtype=precision.compute) for weight in self.weights]
        self.installed = self._slots_of_copies(slots, packed)
        self.refresh()
        unit_of: dict[nn.Module, nn.Module | None] = {}
        for unit in units:
            for inside in (one for root in unit for one in root.modules()):
                unit_of[inside] = unit[0] if unit_of.get(inside, unit[0]) is unit[0] else None
        parts: dict[nn.Module | None, list[_Copy]] = {}
        for copy in self.installed:
            first = {unit_of.get(owner) for owner, _ in copy.slots}
            # Copies shared by several units, or in none, are installed before the forward pass.
            parts.setdefault(first.pop() if len(first) == 1 else None, []).append(copy)
        self.outside_units = parts.pop(None, [])
        for module, copies in parts.items():
            assert module is not None
            patch(module, _InstallsCopies, install_copies=partial(_install, copies))

    def _slots_of_copies(
        self, slots: dict[nn.Parameter, list[tuple[nn.Module, str]]], packed: Sequence[Packed]
    ) -> list[_Copy]:
        """What is installed. The copies of packed weights become parts of one matrix."""
        index_of = {weight: index for index, weight in enumerate(self.weights)}
        found: dict[int, _Copy] = {}
        for pack in packed:
            weights: list[Any] = [layer.weight for layer in pack.layers]
            indices = [index_of.pop(weight) for weight in weights]
            whole = torch.cat([self.copies[index] for index in indices])
            for index, part in zip(indices, torch.split(whole, [len(one) for one in weights]), strict=True):
                self.copies[index] = part
            found[indices[0]] = _Copy(whole, weights, [(pack.owner, "packed_weight")])
        for weight, index in index_of.items():
            found[index] = _Copy(self.copies[index], [weight], slots[weight])
        return [found[index] for index in sorted(found)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Cast the master weights into the copies, after an optimizer step or a load."""
        torch._foreach_copy_(self.copies, [weight.detach() for weight in self.weights])

    def keep_low_precision_gradients(self) -> None:
        """Keep gradients in the dtype in which they leave the backward pass. Without gradient accumulation nothing is
        lost: the optimizer computes in fp32, and fp32 gradients would hold the same values in twice the memory."""
        for weight, copy in zip(self.weights, self.copies, strict=True):
            if weight.requires_grad:
                weight.grad_dtype = copy.dtype

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The master weights, also while the slots of `inner` hold copies."""
        return iter(self.everything)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        _install(self.outside_units)
        return self.inner(*inputs, **named)

    def uninstall(self) -> None:
        """Take the copies out of the slots, and with them the autograd nodes of the last forward pass. The next one
        installs them again."""
        for copy in self.installed:
            copy.uninstall()


def _install(copies: Sequence[_Copy]) -> None:
    """Put copies into the slots of the model. They stay there: recomputation in the backward pass needs them."""
    for copy in copies:
        copy.install()
