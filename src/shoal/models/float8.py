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

VALUES, SLOPES = torch.float8_e4m3fn, torch.float8_e5m2
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
        unit, weight_unit = _unit(inputs, VALUES), _unit(weight, VALUES)
        by_rows, by_columns = rounded_both_ways(inputs, unit, VALUES)
        ctx.save_for_backward(by_columns, weight, unit, weight_unit)
        # Summing in the tensor cores' own short registers is fast, and as good as 8 bits are for what flows forward.
        return _product(by_rows, _rounded(weight, weight_unit, VALUES), unit, weight_unit, inputs.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        inputs, weight, unit, weight_unit = ctx.saved_tensors
        slope_unit = _unit(slope, SLOPES)
        by_rows, by_columns = rounded_both_ways(slope, slope_unit, SLOPES)
        inputs_slope = weight_slope = None
        if ctx.needs_input_grad[0]:
            _, turned = rounded_both_ways(weight, weight_unit, VALUES)
            inputs_slope = _product(by_rows, turned, slope_unit, weight_unit, slope.dtype, fast=False)
        if ctx.needs_input_grad[1]:
            weight_slope = _product(by_columns, inputs, slope_unit, unit, slope.dtype, fast=False)
        return inputs_slope, weight_slope


def _unit(values: Tensor, dtype: torch.dtype) -> Tensor:
    """What the largest of `values` is divided by to become the largest number of `dtype`."""
    # By rows first: so the compiler finds the largest while it writes the rows, and need not read them again.
    largest = values.abs().amax(1).amax()
    return largest.float().clamp_min(SMALLEST) / torch.finfo(dtype).max


def _rounded(values: Tensor, unit: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (values.float() * (1.0 / unit)).clamp(-largest, largest).to(dtype)


def _product(left: Tensor, right: Tensor, unit: Tensor, right_unit: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`left @ right.T`, both lying along what is summed over."""
    if left.is_cuda:
        return torch._scaled_mm(left, right.t(), unit, right_unit, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(left.device.type, enabled=False):  # which would round this product
        return ((_to_fp32(left) @ _to_fp32(right).t()) * (unit * right_unit)).to(dtype)  # the same numbers, slowly


def _to_fp32(values: Tensor) -> Tensor:
    """On a CPU. torch computes each element of e4m3; looking it up among its 256 values takes a third of the time."""
    if values.dtype != VALUES:
        return values.float()
    table = torch.arange(256, dtype=torch.uint8).view(VALUES).float()
    return table.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape)


# An operation of its own, because the compiler would write the turned copy number by number across rows.
@torch.library.custom_op("shoal::rounded_both_ways", mutates_args=())
def rounded_both_ways(values: Tensor, unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`values` divided by `unit` and rounded to `dtype`: as they lie, and turned (columns become rows)."""
    if values.is_cuda:
        from shoal.models.float8_kernel import round_both_ways

        return round_both_ways(values, unit, dtype)
    by_rows = _rounded(values, unit, dtype)
    return by_rows, by_rows.t().contiguous()


@rounded_both_ways.register_fake
def _(values: Tensor, unit: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = values.shape
    return values.new_empty((rows, columns), dtype=dtype), values.new_empty((columns, rows), dtype=dtype)
