"""Float8 matmuls with tensorwise dynamic scaling: `train.precision: fp8` for the linear layers of blocks.

Inputs and weights are cast to e4m3 (more precision), gradients to e5m2 (more range). Each tensor is first divided by
its scale, so that its absolute maximum becomes the largest value of the dtype. Accumulation is in fp32, and the output
has the dtype of the weight. The hardware requires both operands to be contiguous along the reduction dimension. Each
input takes part in two matmuls that reduce over different dimensions, so it is cast once into both layouts, and the
layout that the backward pass needs is saved: 8 bits per element instead of 16. The input of a frozen weight takes part
in one matmul only: nothing of it is saved.
"""

from typing import Any

import torch
from torch import Tensor

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
# The hardware requires dimensions to be multiples of this.
MULTIPLE = 16
# A power of two near the largest e5m2 number: a fixed scale that rounds nothing by itself.
LARGEST_GRADIENT = 32768.0
# Keeps the scale of an all-zero tensor positive.
SMALLEST = 1e-12


def float8_linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`inputs @ weight.T + bias`, with float8 matmuls. Both dimensions of `weight` are multiples of MULTIPLE."""
    flat = inputs.flatten(0, -2).to(weight.dtype)
    matmul: Any = _Float8Matmul if weight.requires_grad else _FrozenFloat8Matmul
    result: Tensor = matmul.apply(flat, weight)
    result = result.view(*inputs.shape[:-1], weight.shape[0])
    return result if bias is None else result + bias.to(result.dtype)


class Float8Head:
    """The weight of a head for a chunked loss: logits and the gradient of hidden states are float8 matmuls. That of the
    weight is not one of its matmuls: it is added up in fp32 over chunks, which costs what float8 would save."""

    def __init__(self, weight: Tensor) -> None:
        self.dtype, self.scale = weight.dtype, _scale_of(weight, VALUES)
        self.row_major, self.column_major = cast_and_transpose(weight, self.scale, VALUES)

    def logits(self, hidden: Tensor) -> Tensor:
        """`hidden @ weight.T`."""
        scale = _scale_of(hidden, VALUES)
        return _matmul(cast_rows(hidden, scale, VALUES), self.row_major, scale, self.scale, self.dtype, fast=True)

    def hidden_gradient(self, grad_logits: Tensor, largest: float) -> Tensor:
        """`grad_logits @ weight`. Gradients of a cross-entropy are at most `largest`, so that their maximum need not be
        computed."""
        scale = torch.full((), largest / LARGEST_GRADIENT, device=grad_logits.device)
        rounded = cast_rows(grad_logits, scale, GRADIENTS)
        return _matmul(rounded, self.column_major, scale, self.scale, self.dtype, fast=False)


class _Float8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        scale, weight_scale = _scale_of(inputs, VALUES), _scale_of(weight, VALUES)
        row_major, column_major = cast_and_transpose(inputs, scale, VALUES)
        ctx.save_for_backward(column_major, weight, scale, weight_scale)
        # Fast accumulation in reduced precision is accurate enough for the forward pass, but not for gradients.
        return _matmul(row_major, _cast(weight, weight_scale, VALUES), scale, weight_scale, inputs.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor]:
        inputs, weight, scale, weight_scale = ctx.saved_tensors
        grad_scale = _scale_of(grad_output, GRADIENTS)
        row_major, column_major = cast_and_transpose(grad_output, grad_scale, GRADIENTS)
        grad_inputs = None
        if ctx.needs_input_grad[0]:
            grad_inputs = _grad_inputs(row_major, grad_scale, weight, weight_scale, grad_output.dtype)
        return grad_inputs, _matmul(column_major, inputs, grad_scale, scale, grad_output.dtype, fast=False)


class _FrozenFloat8Matmul(torch.autograd.Function):
    """Of a weight that is not trained, as below an adapter."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        scale, weight_scale = _scale_of(inputs, VALUES), _scale_of(weight, VALUES)
        ctx.save_for_backward(weight, weight_scale)
        row_major = _cast(inputs, scale, VALUES).contiguous()
        return _matmul(row_major, _cast(weight, weight_scale, VALUES), scale, weight_scale, inputs.dtype, fast=True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        weight, weight_scale = ctx.saved_tensors
        grad_scale = _scale_of(grad_output, GRADIENTS)
        row_major = _cast(grad_output, grad_scale, GRADIENTS).contiguous()
        return _grad_inputs(row_major, grad_scale, weight, weight_scale, grad_output.dtype), None


def _grad_inputs(
    grad_output: Tensor, grad_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    _, transposed = cast_and_transpose(weight, weight_scale, VALUES)
    return _matmul(grad_output, transposed, grad_scale, weight_scale, dtype, fast=False)


def _scale_of(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The scale that maps the absolute maximum of `values` to the largest value of `dtype`."""
    # By rows first: the compiler fuses this reduction into the kernel that writes the rows.
    largest = values.abs().amax(1).amax()
    return largest.float().clamp_min(SMALLEST) / torch.finfo(dtype).max


def _cast(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    largest = torch.finfo(dtype).max
    return (values.float() * (1.0 / scale)).clamp(-largest, largest).to(dtype)


def _matmul(left: Tensor, right: Tensor, scale: Tensor, right_scale: Tensor, dtype: torch.dtype, fast: bool) -> Tensor:
    """`left @ right.T`; both operands are contiguous along the reduction dimension."""
    if left.is_cuda:
        return torch._scaled_mm(left, right.t(), scale, right_scale, out_dtype=dtype, use_fast_accum=fast)
    with torch.autocast(left.device.type, enabled=False):  # autocast would cast this matmul
        return ((_to_fp32(left) @ _to_fp32(right).t()) * (scale * right_scale)).to(dtype)  # the same values, slowly


def _to_fp32(values: Tensor) -> Tensor:
    """For a CPU: a lookup among the 256 values of e4m3 takes a third of the time of torch's conversion."""
    if values.dtype != VALUES:
        return values.float()
    table = torch.arange(256, dtype=torch.uint8).view(VALUES).float()
    return table.index_select(0, values.view(torch.uint8).flatten().int()).view(values.shape)


# A custom operator, because the compiler would write the transposed copy with uncoalesced stores.
@torch.library.custom_op("shoal::cast_and_transpose", mutates_args=())
def cast_and_transpose(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`values` divided by `scale` and cast to `dtype`, and the transpose of that, both contiguous."""
    if values.is_cuda:
        from shoal.models.float8_kernel import cast_and_transpose_kernel

        return cast_and_transpose_kernel(values, scale, dtype)
    row_major = _cast(values, scale, dtype)
    return row_major, row_major.t().contiguous()


def cast_rows(values: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` divided by `scale` and cast to `dtype`, without an fp32 copy of them on CUDA."""
    if not values.is_cuda:
        return _cast(values, scale, dtype)
    from shoal.models.float8_kernel import cast_kernel

    return cast_kernel(values, scale, dtype)


@cast_and_transpose.register_fake
def _(values: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    rows, columns = values.shape
    return values.new_empty((rows, columns), dtype=dtype), values.new_empty((columns, rows), dtype=dtype)
