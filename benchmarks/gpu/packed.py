"""Compare packed projections (`models/packed.py`) with separate linear layers, compiled, then time both.

    PYTHONPATH=src python benchmarks/gpu/packed.py OUTPUT

Writes one line of JSON per case to the file OUTPUT and prints it: the largest difference of a result or gradient from
those in fp32, relative to the largest element, and microseconds of kernels forward and backward, packed and separate.
It runs on a CPU too, without the kernels, on a small case and eagerly.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.models.packed import gated_linear, rotated_projections

# name, sequences, length, hidden size, intermediate size, heads, key-value heads, head dimension
SHAPES = (
    ("smollm2-135m", 32, 512, 576, 1536, 9, 3, 64),
    ("llama3.2-1b", 4, 4096, 2048, 8192, 32, 8, 64),
    ("odd", 3, 100, 96, 160, 3, 1, 32),
)
REPEATS = 20


def separate_gate(inputs: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(inputs, gate)) * F.linear(inputs, up)


def packed_gate(inputs: Tensor, weight: Tensor) -> Tensor:
    return gated_linear(inputs, weight)


def separate_heads(
    inputs: Tensor, query: Tensor, key: Tensor, value: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, ...]:
    def heads(weight: Tensor) -> Tensor:
        return F.linear(inputs, weight).view(*inputs.shape[:2], -1, cos.shape[-1]).transpose(1, 2)

    def rotated(given: Tensor) -> Tensor:
        first, second = given.chunk(2, dim=-1)
        turned = given * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
        return turned.to(inputs.dtype)

    return rotated(heads(query)), rotated(heads(key)), heads(value)


def packed_heads(inputs: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, count: int) -> tuple[Tensor, ...]:
    return rotated_projections(inputs, weight, cos, sin, count)


def gradients(
    function: Callable[..., Any], leaves: Sequence[Tensor], others: Sequence[Any], incoming: Sequence[Tensor]
) -> list[Tensor]:
    results = function(*leaves, *others)
    results = results if isinstance(results, tuple) else (results,)
    return [*results, *torch.autograd.grad(results, leaves, [one.to(results[0].dtype) for one in incoming])]


def difference(found: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    return max(
        float((one.detach().float() - other.detach()).abs().max() / other.detach().abs().max())
        for one, other in zip(found, reference, strict=True)
    )


def microseconds(run: Callable[[], object]) -> float | None:
    """Of kernels alone: training replays them in a graph, without the host's time."""
    if not torch.cuda.is_available():
        return None
    for _ in range(3):
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    return round(sum(float(one.self_device_time_total) for one in profile.key_averages()) / REPEATS, 1)


def compare(separate: Callable[..., Any], packed: Callable[..., Any], leaves: list[Tensor], others: list[Any],
            more: list[Any], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> dict[str, Any]:  # fmt: skip
    """`leaves`: the input and the matrices; `more`: what only the packed function takes."""
    device = leaves[0].device
    incoming = [torch.randn(shape, device=device) for shape in shapes]
    reference = gradients(separate, [one.float().requires_grad_() for one in leaves], others, incoming)
    low = [one.to(dtype).requires_grad_() for one in leaves]
    whole = [low[0], torch.cat(low[1:]).detach().requires_grad_()]
    if device.type == "cuda":
        separate, packed = torch.compile(separate), torch.compile(packed)
    apart = gradients(separate, low, others, incoming)
    together = gradients(packed, whole, [*others, *more], incoming)
    parts = torch.split(together.pop(), [len(one) for one in leaves[1:]])
    return {
        "packed_difference": difference([*together, *parts], reference),
        "separate_difference": difference(apart, reference),
        "packed_us": microseconds(lambda: gradients(packed, whole, [*others, *more], incoming)),
        "separate_us": microseconds(lambda: gradients(separate, low, others, incoming)),
    }


def main(output: Path) -> None:
    cuda = torch.cuda.is_available()
    device, dtype = torch.device("cuda" if cuda else "cpu"), torch.bfloat16 if cuda else torch.float32
    torch.manual_seed(0)
    lines = []
    for name, batch, length, hidden, wide, heads, keys, width in SHAPES if cuda else SHAPES[2:]:
        inputs = torch.randn(batch, length, hidden, device=device).to(dtype)
        gate_up = [(torch.randn(wide, hidden, device=device) / hidden**0.5).to(dtype) for _ in range(2)]
        found = compare(separate_gate, packed_gate, [inputs, *gate_up], [], [], [(batch, length, wide)], dtype)
        lines.append({"shape": name, "layers": "gate, up", **found})
        matrices = [
            (torch.randn(count * width, hidden, device=device) / hidden**0.5).to(dtype) for count in (heads, keys, keys)
        ]
        angles = torch.arange(length, device=device)[:, None] / 10_000 ** (
            torch.arange(width // 2, device=device) * 2 / width
        )
        cos, sin = (torch.cat([one, one], dim=-1)[None] for one in (angles.cos(), angles.sin()))
        shapes = [(batch, count, length, width) for count in (heads, keys, keys)]
        found = compare(separate_heads, packed_heads, [inputs, *matrices], [cos, sin], [heads], shapes, dtype)
        lines.append({"shape": name, "layers": "query, key, value", **found})
        torch.compiler.reset()
    output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(output.read_text(), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
