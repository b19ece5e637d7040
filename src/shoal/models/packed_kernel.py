"""The Triton kernels behind `models.packed`. Imported on CUDA only.

Each moves a tensor once. What they add to the compiler's kernels is their layout: queries, keys and values, or gate and
up, are columns of one matrix, in the backward pass too. The compiler would write such a matrix by masked kernels that
compute every part for every column.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements that a program reads of each tensor, and the widest part of a row.
ELEMENTS, WIDEST = 2048, 1024
TOKENS = 8  # that a program rotates


@triton.jit
def _gate(gate_up, hidden, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row < rows
    gate = tl.load(gate_up + row * (2 * WIDTH) + column, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + column, inside, other=0.0).to(tl.float32)
    result = gate * tl.sigmoid(gate) * up
    tl.store(hidden + row * WIDTH + column, result.to(hidden.dtype.element_ty), inside)


@triton.jit
def _gate_backward(gate_up, gradient, result, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = row < rows
    first = row * (2 * WIDTH) + column
    gate = tl.load(gate_up + first, inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + first + WIDTH, inside, other=0.0).to(tl.float32)
    incoming = tl.load(gradient + row * WIDTH + column, inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    of_gate = incoming * up * share * (1.0 + gate * (1.0 - share))
    of_up = incoming * gate * share
    tl.store(result + first, of_gate.to(result.dtype.element_ty), inside)
    tl.store(result + first + WIDTH, of_up.to(result.dtype.element_ty), inside)


@triton.jit
def _rotate(packed, cos, sin, tokens, length, cos_batch, WIDTH: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
            TOKENS: tl.constexpr):  # fmt: skip
    """The first `HEADS` heads of each row, in place."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside, column = token < tokens, tl.arange(0, HALF)[None, :]
    angle = token // length * cos_batch + token % length * (2 * HALF) + column
    cosine = tl.load(cos + angle, inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, inside, other=0.0).to(tl.float32)
    for head in range(HEADS):
        at = packed + token * WIDTH + head * (2 * HALF) + column
        first = tl.load(at, inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, inside, other=0.0).to(tl.float32)
        tl.store(at, (first * cosine - second * sine).to(packed.dtype.element_ty), inside)
        tl.store(at + HALF, (second * cosine + first * sine).to(packed.dtype.element_ty), inside)


@triton.jit
def _rotate_back(query, key, value, result, cos, sin, tokens, length, cos_batch, QUERIES: tl.constexpr,
                 KEYS: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr):  # fmt: skip
    """The gradients of queries and keys, rotated back, and those of values, as columns of one matrix."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside, column = token < tokens, tl.arange(0, HALF)[None, :]
    angle = token // length * cos_batch + token % length * (2 * HALF) + column
    cosine = tl.load(cos + angle, inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, inside, other=0.0).to(tl.float32)
    target = result + token * ((QUERIES + 2 * KEYS) * 2 * HALF) + column
    dtype = result.dtype.element_ty
    for head in range(QUERIES):
        at = query + token * (QUERIES * 2 * HALF) + head * (2 * HALF) + column
        first = tl.load(at, inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, inside, other=0.0).to(tl.float32)
        tl.store(target, (first * cosine + second * sine).to(dtype), inside)
        tl.store(target + HALF, (second * cosine - first * sine).to(dtype), inside)
        target += 2 * HALF
    for head in range(KEYS):
        at = key + token * (KEYS * 2 * HALF) + head * (2 * HALF) + column
        first = tl.load(at, inside, other=0.0).to(tl.float32)
        second = tl.load(at + HALF, inside, other=0.0).to(tl.float32)
        tl.store(target, (first * cosine + second * sine).to(dtype), inside)
        tl.store(target + HALF, (second * cosine - first * sine).to(dtype), inside)
        target += 2 * HALF
    for head in range(KEYS):
        at = value + token * (KEYS * 2 * HALF) + head * (2 * HALF) + column
        tl.store(target, tl.load(at, inside, other=0.0), inside)
        tl.store(target + HALF, tl.load(at + HALF, inside, other=0.0), inside)
        target += 2 * HALF


def columns_of(width: int) -> int:
    """Columns of a program: a power of two that divides `width`."""
    return min(width & -width, WIDEST)


def gate_kernel(gate_up: Tensor) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    columns = columns_of(width)
    per_program = ELEMENTS // columns
    hidden = gate_up.new_empty(rows, width)
    grid = (triton.cdiv(rows, per_program), width // columns)
    _gate[grid](gate_up, hidden, rows, WIDTH=width, ROWS=per_program, COLUMNS=columns)
    return hidden


def gate_backward_kernel(gate_up: Tensor, gradient: Tensor) -> Tensor:
    rows, width = gradient.shape
    columns = columns_of(width)
    per_program = ELEMENTS // columns
    result = torch.empty_like(gate_up)
    grid = (triton.cdiv(rows, per_program), width // columns)
    _gate_backward[grid](gate_up, gradient, result, rows, WIDTH=width, ROWS=per_program, COLUMNS=columns)
    return result


def rotate_kernel(packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> Tensor:
    """In place."""
    tokens, (batch, length, width) = packed.shape[0], cos.shape
    _rotate[(triton.cdiv(tokens, TOKENS),)](
        packed,
        cos,
        sin,
        tokens,
        length,
        0 if batch == 1 else length * width,
        WIDTH=packed.shape[1],
        HEADS=heads,
        HALF=width // 2,
        TOKENS=TOKENS,
    )
    return packed


def rotate_back_kernel(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    tokens, (batch, length, width) = query.shape[0], cos.shape
    result = query.new_empty(tokens, query.shape[1] + 2 * key.shape[1])
    _rotate_back[(triton.cdiv(tokens, TOKENS),)](
        query,
        key,
        value,
        result,
        cos,
        sin,
        tokens,
        length,
        0 if batch == 1 else length * width,
        QUERIES=query.shape[1] // width,
        KEYS=key.shape[1] // width,
        HALF=width // 2,
        TOKENS=TOKENS,
    )
    return result
