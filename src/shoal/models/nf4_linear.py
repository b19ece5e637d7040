"""Matmuls with frozen weights in NF4, without and with a LoRA adapter."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.emulate import emulated_matmuls, emulated_now
from shoal.models.nf4 import dequantize_nf4, is_library, tensors_of


def nf4_linear(inputs: Tensor, parts: Mapping[str, Tensor], bias: Tensor | None = None, kind: str = "nf4") -> Tensor:
    """`inputs @ weight.T + bias` in the dtype of `inputs`, where `weight` is stored in `parts` and is not trained.

    The dequantized weight exists only during the matmul: the backward pass dequantizes it again.
    """
    result: Tensor = nf4_matmul(inputs, *tensors_of(parts), is_library(kind), False, None, None)
    return result if bias is None else result + bias.to(result.dtype)


def nf4_lora_linear(
    inputs: Tensor,
    parts: Mapping[str, Tensor],
    down: Tensor,
    up: Tensor,
    scale: float,
    bias: Tensor | None = None,
    kind: str = "nf4",
) -> Tensor:
    """`nf4_linear` of `weight + scale · up @ down`, of which `up` and `down` are trained.

    The output of `up @ down` is added in place, and so is its part of the gradient of `inputs`. As tensors of their own
    they would be as large as the layer's output and input.
    """
    down, up = down.to(inputs.dtype), up.to(inputs.dtype)
    with torch.no_grad():  # the operator has its derivative
        low = F.linear(inputs, down) * scale
    result: Tensor = nf4_lora_matmul(inputs, low, down, up, scale, *tensors_of(parts), is_library(kind))
    return result if bias is None else result + bias.to(result.dtype)


# Custom operators, so that the compiler neither saves the dequantized weight for the backward pass nor, as with an
# autograd.Function, saves the result although activation checkpointing recomputes it.
@torch.library.custom_op("shoal::nf4_matmul", mutates_args=())
def nf4_matmul(
    inputs: Tensor,
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    by_library: bool,
    transposed: bool,
    left: Tensor | None,
    right: Tensor | None,
) -> Tensor:
    """`inputs @ weight.T`, or `inputs @ weight` if `transposed`; plus `left @ right`, through which no gradient
    flows."""
    matrix: Tensor = dequantize_nf4(weight, absmax, nested_absmax, nested_offset, inputs.dtype, by_library)
    if not transposed:
        matrix = matrix.t()
    if not inputs.is_cuda:
        # Some CPUs multiply slowly in low precision, and `emulate` does not see into an operator.
        result = inputs.float() @ matrix.float()
        if left is not None and right is not None:
            result += left.float() @ right.float()
        return result.to(inputs.dtype)
    result = inputs @ matrix
    if left is not None and right is not None:
        result.flatten(0, -2).addmm_(left.flatten(0, -2), right)
    return result


@nf4_matmul.register_fake
def _(
    inputs: Tensor,
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    by_library: bool,
    transposed: bool,
    left: Tensor | None,
    right: Tensor | None,
) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], weight.shape[1] * 2 if transposed else weight.shape[0]))


def _save_parts(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *parts, ctx.by_library, ctx.transposed, _, _ = inputs
    ctx.save_for_backward(*parts)


def _grad_inputs(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    grad = nf4_matmul(grad_output, *ctx.saved_tensors, ctx.by_library, not ctx.transposed, None, None)
    return grad, *[None] * 8


nf4_matmul.register_autograd(_grad_inputs, setup_context=_save_parts)


@torch.library.custom_op("shoal::nf4_lora_matmul", mutates_args=())
def nf4_lora_matmul(
    inputs: Tensor,
    low: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    by_library: bool,
) -> Tensor:
    """`inputs @ (weight + scale · up @ down).T`, given `low`, which is `scale · inputs @ down.T`.

    `low` is computed outside: if the result is not needed, activation checkpointing recomputes `low` alone.
    """
    parts = weight, absmax, nested_absmax, nested_offset
    result: Tensor = nf4_matmul(inputs, *parts, by_library, False, low, up.t())
    return result


@nf4_lora_matmul.register_fake
def _(
    inputs: Tensor,
    low: Tensor,
    down: Tensor,
    up: Tensor,
    scale: float,
    weight: Tensor,
    absmax: Tensor,
    nested_absmax: Tensor | None,
    nested_offset: Tensor | None,
    by_library: bool,
) -> Tensor:
    return inputs.new_empty((*inputs.shape[:-1], weight.shape[0]))


def _save_for_lora(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    given, low, down, up, ctx.scale, *parts, ctx.by_library = inputs
    ctx.save_for_backward(given, low, down, up, *parts)
    ctx.emulated = emulated_now()


def _grad_lora(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    inputs, low, down, up, *parts = ctx.saved_tensors
    with emulated_matmuls(ctx.emulated):
        grad_low = grad_output @ up * ctx.scale
        grad_down = grad_low.flatten(0, -2).t() @ inputs.flatten(0, -2)
        grad_up = grad_output.flatten(0, -2).t() @ low.flatten(0, -2)
    grad_inputs = None
    if ctx.needs_input_grad[0]:
        grad_inputs = nf4_matmul(grad_output, *parts, ctx.by_library, True, grad_low, down)
    return grad_inputs, None, grad_down, grad_up, *[None] * 6


nf4_lora_matmul.register_autograd(_grad_lora, setup_context=_save_for_lora)
