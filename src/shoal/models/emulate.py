"""bf16 and fp16 matmuls on a CPU that has no fast instructions for them.

There torch multiplies element by element, 50 to 100 times slower than fp32. `EmulatedMatmuls` computes them as hardware
with fp32 accumulation does: inputs are cast to the low precision, multiplied and summed in fp32, and the result is cast
back. Attention likewise. The operations are those on autocast's list; all others are unchanged.

`slow_dtypes` decides by a measurement in this process: whether matmuls in a dtype are slow depends on the processor, on
oneDNN, and on the instruction set that oneDNN is allowed to use.
"""

import os
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from shoal.mistakes import UserMistake

LOW_PRECISION = (torch.bfloat16, torch.float16)
# For tests and comparisons: `emulated` or `native` overrides the measurement.
VARIABLE = "SHOAL_MATMULS"
# A matmul is slow if it takes longer than this many times one in fp32. With instructions for the dtype it takes about
# as long or less; where oneDNN converts the inputs first, 3 to 5 times as long.
SLOW = 2.0
SIZE, REPEATS = 128, 7


@cache
def slow_dtypes() -> frozenset[torch.dtype]:
    """The low-precision dtypes in which this process's CPU multiplies slowly."""
    wanted = os.environ.get(VARIABLE, "measured")
    if wanted not in ("measured", "emulated", "native"):
        raise UserMistake(f"{VARIABLE} is {wanted!r} in the environment; set it to emulated or native, or unset it.")
    if wanted != "measured":
        return frozenset(LOW_PRECISION if wanted == "emulated" else ())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other on a busy machine, whatever the dtype
    try:
        # The fastest of several: another process may have had the core in between. In turns: a core that is slower for
        # a while, because it is busy or was idle, is so for all of them.
        rounds = [[_matmul_seconds(dtype) for dtype in (torch.float32, *LOW_PRECISION)] for _ in range(REPEATS)]
        exact, *low = map(min, zip(*rounds, strict=True))
    finally:
        torch.set_num_threads(threads)
    return frozenset(dtype for dtype, seconds in zip(LOW_PRECISION, low, strict=True) if seconds > SLOW * exact)


def _matmul_seconds(dtype: torch.dtype) -> float:
    left, right = torch.ones(SIZE, SIZE, dtype=dtype), torch.ones(SIZE, SIZE, dtype=dtype)
    began = time.perf_counter()
    torch.mm(left, right)
    return time.perf_counter() - began


def emulated_dtypes(device: torch.device, *computed: torch.dtype) -> frozenset[torch.dtype]:
    """The dtypes in `computed` whose matmuls are slow on `device`."""
    low = frozenset(computed).intersection(LOW_PRECISION)
    return low & slow_dtypes() if low and device.type == "cpu" else frozenset()


def emulated_matmuls(dtypes: Iterable[torch.dtype]) -> AbstractContextManager[Any]:
    """A context in which matmuls and attention of this thread are emulated for `dtypes`."""
    slow = frozenset(dtypes)
    return EmulatedMatmuls(slow) if slow else nullcontext()


def emulated_now() -> frozenset[torch.dtype]:
    """The dtypes that are emulated where this is called, for a backward pass that computes matmuls again."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return frozenset().union(*(mode.dtypes for mode in modes if isinstance(mode, EmulatedMatmuls)))


class EmulatedForward:
    """A module whose forward pass is emulated, and therefore its backward pass too. Activation checkpointing runs a
    forward pass inside the backward pass, so each checkpointed block is patched as well."""

    emulated: frozenset[torch.dtype]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with EmulatedMatmuls(self.emulated):
            return super().forward(*inputs, **named)  # type: ignore[misc]


class EmulatedMatmuls(TorchFunctionMode):
    """The mode of `emulated_matmuls`. It does not apply to backward passes: torch disables modes while they run."""

    def __init__(self, dtypes: frozenset[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        emulate = _EMULATED.get(func)
        if emulate is None:
            return func(*args, **kwargs)
        dtypes = _dtypes_of((*args, *kwargs.values()))
        if dtypes and dtypes <= _AUTOCAST_FROM and func not in _NOT_AUTOCAST and torch.is_autocast_enabled("cpu"):
            dtypes = {torch.get_autocast_dtype("cpu")}
        dtype = dtypes.pop() if len(dtypes) == 1 else None  # torch raises an error for mixed dtypes
        if dtype is None or dtype not in self.dtypes:
            return func(*args, **kwargs)
        out = kwargs.pop("out", None)
        with _no_autocast():
            result = emulate(func, dtype, args, kwargs)
        return result if out is None else out.copy_(result)


def _dtypes_of(arguments: Iterable[Any]) -> set[torch.dtype | None]:
    """The dtypes of the floating-point tensors among the arguments; None for tensors on another device."""
    found: set[torch.dtype | None] = set()
    for one in arguments:
        if isinstance(one, Tensor):
            if one.is_floating_point():
                found.add(one.dtype if one.device.type == "cpu" else None)
        elif isinstance(one, list | tuple):  # einsum's operands
            found |= _dtypes_of(one)
    return found


def _no_autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _cast_to_fp32(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_cast_to_fp32(one, dtype) for one in value)
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype).float()
    return value


def _in_fp32(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any of these operations: the backward of the casts rounds the gradients."""
    wide = {key: _cast_to_fp32(value, dtype) for key, value in kwargs.items()}
    return func(*_cast_to_fp32(args, dtype), **wide).to(dtype)


def _linear(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    inputs, weight, bias = _bind(("input", "weight", "bias"), args, kwargs)
    return _Linear.apply(  # type: ignore[no-untyped-call]
        _cast(inputs, dtype), _cast(weight, dtype), _cast(bias, dtype)
    )


def _addmm(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bias, left, right = (_cast(one, dtype) for one in _bind(("input", "mat1", "mat2"), args, kwargs))
    if kwargs.keys() & {"alpha", "beta"} or bias.dim() != 1:
        return _in_fp32(func, dtype, args, kwargs)
    return _Linear.apply(left, right.t(), bias)  # type: ignore[no-untyped-call]


def _matmul(func: Any, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if kwargs or len(args) != 2:
        return _in_fp32(func, dtype, args, kwargs)
    left, right = (_cast(one, dtype) for one in args)
    if right.dim() == 2 and left.dim() >= 2:
        return _Linear.apply(left, right.t(), None)  # type: ignore[no-untyped-call]
    if left.dim() == right.dim() and left.shape[:-2] == right.shape[:-2]:
        return _BatchedMatmul.apply(left, right)  # type: ignore[no-untyped-call]
    return _in_fp32(func, dtype, args, kwargs)  # broadcasting, or a vector


def _bind(names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    return (*args, *(kwargs.get(name) for name in names[len(args) :]))


class _Linear(torch.autograd.Function):
    """`inputs @ weight.T + bias`. Tensors saved for the backward pass are in low precision: they take the same memory
    as on other hardware, and weights that FSDP has gathered can be freed in between."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        return F.linear(inputs.float(), weight.float(), None if bias is None else bias.float()).to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        inputs, weight = ctx.saved_tensors
        dtype, wide = inputs.dtype, gradient.float()
        flat = wide.flatten(0, -2)
        inputs_gradient = weight_gradient = bias_gradient = None
        with _no_autocast():
            if ctx.needs_input_grad[0]:
                inputs_gradient = torch.matmul(wide, weight.float()).to(dtype)
            if ctx.needs_input_grad[1]:
                weight_gradient = torch.mm(flat.t(), inputs.flatten(0, -2).float()).to(dtype)
        if ctx.needs_input_grad[2]:
            bias_gradient = flat.sum(0).to(dtype)
        return inputs_gradient, weight_gradient, bias_gradient


class _BatchedMatmul(torch.autograd.Function):
    """A batched matmul with equal batch dimensions; saves low-precision tensors, as `_Linear` does."""

    @staticmethod
    def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
        ctx.save_for_backward(left, right)
        return torch.matmul(left.float(), right.float()).to(left.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
        left, right = ctx.saved_tensors
        wide = gradient.float()
        left_gradient = right_gradient = None
        with _no_autocast():
            if ctx.needs_input_grad[0]:
                left_gradient = torch.matmul(wide, right.float().mT).to(left.dtype)
            if ctx.needs_input_grad[1]:
                right_gradient = torch.matmul(left.float().mT, wide).to(right.dtype)
        return left_gradient, right_gradient


Emulate = Callable[[Any, torch.dtype, tuple[Any, ...], dict[str, Any]], Any]

_AUTOCAST_FROM = {torch.float32, *LOW_PRECISION}
# The operations below that autocast runs in the dtype of their inputs.
_NOT_AUTOCAST = frozenset([torch.mv, Tensor.mv, F.grouped_mm, torch._grouped_mm])
_EMULATED: dict[Any, Emulate] = {
    **dict.fromkeys([F.linear], _linear),
    **dict.fromkeys([torch.addmm, Tensor.addmm], _addmm),
    **dict.fromkeys([torch.matmul, torch.mm, torch.bmm, Tensor.matmul, Tensor.mm, Tensor.bmm], _matmul),
    **dict.fromkeys(
        [
            torch.einsum,
            torch.baddbmm,
            torch.addbmm,
            torch.mv,
            Tensor.baddbmm,
            Tensor.addbmm,
            Tensor.mv,
            F.scaled_dot_product_attention,
            F.conv1d,
            F.conv2d,
            F.conv3d,
            F.conv_transpose1d,
            F.conv_transpose2d,
            F.grouped_mm,
            torch._grouped_mm,
        ],
        _in_fp32,
    ),
}
