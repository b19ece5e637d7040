"""Linear layers that read the same tensor as one matmul: queries, keys and values; gate and up of a gated MLP.

One matmul takes the place of two or three in the forward pass and in both of the backward pass, where the gradients of
the input would have to be written and read again to be added. What follows a layer is part of the operator, because its
backward pass writes the gradients of all layers as columns of one matrix: the rotary embedding, and the gate.
"""

from typing import Any

import torch
from torch import Tensor


def gated_linear(inputs: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) × up, of layers whose matrices are the upper and the lower half of `weight`."""
    result: Tensor = _GatedLinear.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return result


def rotated_projections(
    inputs: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys, to which the rotary embedding is applied, and values, each [batch, heads, length, width].
    `weight` is the matrices of all three; `heads`: of the queries."""
    found: tuple[Tensor, Tensor, Tensor] = _RotatedProjections.apply(inputs, weight, cos, sin, heads)  # type: ignore[no-untyped-call]
    return found


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        gate_up = _rows(inputs) @ weight.t()
        ctx.save_for_backward(inputs, weight, gate_up)
        return _gate(gate_up).view(*inputs.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inputs, weight, gate_up = ctx.saved_tensors
        packed = _gate_backward(gate_up, _rows(gradient).contiguous())
        return (packed @ weight).view(inputs.shape), packed.t() @ _rows(inputs)


class _RotatedProjections(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        cos, sin = cos.contiguous(), sin.contiguous()
        parts = _rotate(_rows(inputs) @ weight.t(), cos, sin, heads)
        ctx.save_for_backward(inputs, weight, cos, sin)
        # Tensors of their own: views of one would lose their gradients where the compiler ends a graph here.
        query, key, value = (one.view(*inputs.shape[:-1], -1, cos.shape[-1]).transpose(1, 2) for one in parts)
        return query, key, value

    @staticmethod
    def backward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        inputs, weight, cos, sin = ctx.saved_tensors
        rows = inputs.shape[0] * inputs.shape[1]
        # Whatever layout the attention kernel chose: mostly this is a view.
        query, key, value = (one.transpose(1, 2).reshape(rows, -1).contiguous() for one in (query, key, value))
        packed = _rotate_back(query, key, value, cos, sin)
        return (packed @ weight).view(inputs.shape), packed.t() @ _rows(inputs), None, None, None


def _rows(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1, tensor.shape[-1])


def _gate(gate_up: Tensor) -> Tensor:
    if gate_up.is_cuda:
        from shoal.models.packed_kernel import gate_kernel

        return gate_kernel(gate_up)
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up.dtype)


def _gate_backward(gate_up: Tensor, gradient: Tensor) -> Tensor:
    if gate_up.is_cuda:
        from shoal.models.packed_kernel import gate_backward_kernel

        return gate_backward_kernel(gate_up, gradient)
    (gate, up), incoming = gate_up.float().chunk(2, dim=-1), gradient.float()
    share = gate.sigmoid()
    of_gate = incoming * up * share * (1 + gate * (1 - share))
    return torch.cat([of_gate, incoming * gate * share], dim=-1).to(gate_up.dtype)


def _rotate(packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with the rotary embedding, and values."""
    if packed.is_cuda:
        from shoal.models.packed_kernel import rotate_kernel

        return rotate_kernel(packed, cos, sin, heads)
    width = cos.shape[-1]
    keys = (packed.shape[1] // width - heads) // 2
    query, key, value = packed.split([heads * width, keys * width, keys * width], dim=-1)  # type: ignore[no-untyped-call]
    return _rotated(query, cos, sin), _rotated(key, cos, sin), value.clone()


def _rotate_back(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of what `_rotate` was given."""
    if query.is_cuda:
        from shoal.models.packed_kernel import rotate_back_kernel

        return rotate_back_kernel(query, key, value, cos, sin)
    return torch.cat([_rotated(query, cos, -sin), _rotated(key, cos, -sin), value], dim=-1)


def _rotated(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    length, width = cos.shape[1:]
    per_head = rows.float().reshape(-1, length, rows.shape[1] // width, width)
    first, second = per_head.chunk(2, dim=-1)
    # Both halves of a head have the same angles.
    cosine, sine = (one.float()[:, :, None, : width // 2] for one in (cos, sin))
    rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)
    return rotated.view(rows.shape).to(rows.dtype)
