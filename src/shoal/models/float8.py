"""Matrix products in 8-bit floats, one scale a tensor: what `train.precision: fp8` does to the linear layers of blocks.

Inputs and weights are rounded to e4m3 (more digits), gradients to e5m2 (more range); each tensor is first divided by
its unit, so that its largest number becomes the largest there is. Products are summed in fp32 and leave in the weight's
type. The hardware multiplies two matrices only if both lie along the dimension that is summed over. Each input takes
part in two products that sum over different dimensions, so it is rounded once into both layouts, and the one that the
backward pass needs is what is kept: 8 bits instead of 16.
"""

from typing import Any

import torch
from torch import Tensor

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
# What the hardware wants dimensions to be multiples of.
MULTIPLE = 16
# A tensor of zeros has a unit too.
SMALLEST = 1e-12


def float8_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, multiplied in 8 bits. Both dimensions of `weight` are multiples of MULTIPLE."""
    flat = inputs.flatten(0, -2).to(weight.dtype)
    result: Tensor = _Float8Product.apply(flat, weight)  # type: ignore[no-untyped-call]
    result = result.view(*inputs.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias.to(result.dtype)


class _Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        scale, weight_scale = _scale_of(inputs, VALUES), _scale_of(weight, VALUES)
        row_major, column_major = cast_and_transpose(inputs, scale, VALUES)
        ctx.save_for_backward(column_major, weight, scale, weight_scale)
        # Summing in the tensor cores' own short registers is fast, and as good as 8 bits are for what flows forward.
        return _product(row_major, _rounded(weight, weight_scale, VALUES), scale, weight_scale, inputs.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight, scale, weight_scale = ctx.saved_tensors
        grad_scale = _scale_of(grad_output, GRADIENTS)
        row_major, column_major = cast_and_transpose(grad_output, grad_scale, GRADIENTS)
        grad_inputs = grad_weight = None
        if ctx.needs_input_grad[0]:
            _, transposed = cast_and_transpose(weight, weight_scale, VALUES)
            grad_inputs = _product(row_major, transposed, grad_scale, weight_scale, grad_output.dtype, fast=False)
        if ctx.needs_input_grad[1]:
            grad_weight = _product(column_major, inputs, grad_scale, scale, grad_output.dtype, fast=False)
        return grad_inputs, grad_weight


def _scale_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What the largest of `values` is divided by to become the largest number of `dtype`."""
    # By rows first: so the compiler finds the largest while it writes the rows, and need not read them again.
    largest = values.abs().amax(1).amax()
    return largest.float().clamp_min(SMALLEST) / torch.finfo(dtype).max


def _rounded(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (values.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)


def _product(left: Tensor, right: Tensor, scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`left @ right.T`, both lying along what is summed over."""
    if left.is_cuda:
        return torch._scaled_mm(left, right.t(), scale, right_scale, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(left.device.type, enabled=False):  # which would round this product
        return ((_to_fp32(left) @ _to_fp32(right).t()) * (scale * right_scale)).to(dtype)  # the same numbers, slowly


def _to_fp32(values: Tensor) -> Tensor:
    """On a CPU. torch computes each element of e4m3; looking it up among its 256 values takes a third of the time."""
    if values.dtype != VALUES:
        return values.float()
    table = torch.arange(256, dtype=torch.uint8).view(VALUES).float()
    return table.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape)


# An operation of its own, because the compiler would write the turned copy number by number across rows.
@torch.library.custom_op("shoal::rounded_both_ways", mutates_args=())
def cast_and_transpose(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`values` divided by `scale` and rounded to `dtype`: as they lie, and turned (columns become rows)."""
    if values.is_cuda:
        from shoal.models.float8_kernel import cast_and_transpose_kernel

        return cast_and_transpose_kernel(values, scale, dtype)
    row_major = _rounded(values, scale, dtype)
    return row_major, row_major.t().contiguous()


@cast_and_transpose.register_fake
def _(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = values.shape
    return values.new_empty((rows, columns), dtype=dtype), values.new_empty((columns, rows), dtype=dtype)
