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
def _turn(source, target, cosine, sine, inside, HALF: tl.constexpr):
    """A head of several tokens."""
    first = tl.load(source, inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, inside, other=0.0).to(tl.float32)
    tl.store(target, (first * cosine - second * sine).to(target.dtype.element_ty), inside)
    tl.store(target + HALF, (second * cosine + first * sine).to(target.dtype.element_ty), inside)


@triton.jit
def _rotate(
    packed,
    query,
    key,
    value,
    cos,
    sin,
    tokens,
    length,
    cos_batch,  # 0: all sequences have the same angles
    BACKWARD: tl.constexpr,  # from the three to `packed`, and the angles are negative
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    inside, column = token < tokens, tl.arange(0, HALF)[None, :]
    angle = token // length * cos_batch + token % length * (2 * HALF) + column
    cosine = tl.load(cos + angle, inside, other=0.0).to(tl.float32)
    sine = tl.load(sin + angle, inside, other=0.0).to(tl.float32)
    together = packed + token * ((QUERIES + 2 * KEYS) * 2 * HALF) + column
    for head in range(QUERIES):
        apart = query + token * (QUERIES * 2 * HALF) + head * (2 * HALF) + column
        if BACKWARD:
            _turn(apart, together, cosine, -sine, inside, HALF)
        else:
            _turn(together, apart, cosine, sine, inside, HALF)
        together += 2 * HALF
    for head in range(KEYS):
        apart = key + token * (KEYS * 2 * HALF) + head * (2 * HALF) + column
        if BACKWARD:
            _turn(apart, together, cosine, -sine, inside, HALF)
        else:
            _turn(together, apart, cosine, sine, inside, HALF)
        together += 2 * HALF
    for head in range(KEYS):
        apart = value + token * (KEYS * 2 * HALF) + head * (2 * HALF) + column
        for half in range(2):
            if BACKWARD:
                tl.store(together + half * HALF, tl.load(apart + half * HALF, inside, other=0.0), inside)
            else:
                tl.store(apart + half * HALF, tl.load(together + half * HALF, inside, other=0.0), inside)
        together += 2 * HALF


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


def rotate_kernel(packed: Tensor, cos: Tensor, sin: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    width = cos.shape[-1]
    keys = (packed.shape[1] // width - heads) // 2
    query, key, value = (packed.new_empty(packed.shape[0], count * width) for count in (heads, keys, keys))
    _launch(packed, query, key, value, cos, sin, backward=False)
    return query, key, value


def rotate_back_kernel(query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    packed = query.new_empty(query.shape[0], query.shape[1] + 2 * key.shape[1])
    _launch(packed, query, key, value, cos, sin, backward=True)
    return packed


def _launch(
    packed: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor, *, backward: bool
) -> None:
    tokens, (batch, length, width) = packed.shape[0], cos.shape
    _rotate[(triton.cdiv(tokens, TOKENS),)](
        packed,
        query,
        key,
        value,
        cos,
        sin,
        tokens,
        length,
        0 if batch == 1 else length * width,
        BACKWARD=backward,
        QUERIES=query.shape[1] // width,
        KEYS=key.shape[1] // width,
        HALF=width // 2,
        TOKENS=TOKENS,
    )
