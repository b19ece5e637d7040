"""Compare NF4 dequantization on a CUDA device with the CPU and with bitsandbytes, then time both.

    PYTHONPATH=src python benchmarks/gpu/nf4.py OUTPUT

Writes JSON to the file OUTPUT and prints its lines. It needs torch, triton, shoal, a GPU and, for the comparisons,
bitsandbytes; takes about a minute. Fails, after it has written everything, if a dequantized matrix differs bitwise.
`--tiny` runs the comparisons on the CPU alone.
"""

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.models import nf4
from shoal.models.nf4_linear import nf4_linear

TINY = "--tiny" in sys.argv
DEVICE = torch.device("cpu" if TINY else "cuda")
LIBRARY = find_spec("bitsandbytes") is not None
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# The first is smaller than a program of the kernel, the second and third end within one.
SHAPES = [(3, 64), (257, 704), (1000, 576)] + ([] if TINY else [(4096, 4096), (1024, 14336)])
MUST_BE_ZERO = ("dequantized_differs_from_cpu", "dequantized_differs_from_bitsandbytes")
TIMED = [(4096, 4096), (14336, 4096), (4096, 14336)]
# Blocks per program of the kernel, and warps.
TILES = [(16, 1), (16, 2), (16, 4), (32, 2), (32, 4), (32, 8), (64, 4), (64, 8), (64, 16), (128, 8), (128, 16)]


def random(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(shape[0])) * 0.02
    weight[0] = 0
    return weight.to(dtype)


def on(device: torch.device, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: part.to(device) for name, part in parts.items()}


def different(found: Tensor, expected: Tensor) -> int:
    """Elements that differ bitwise, except for the sign of zero."""
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    return int((found.cpu() != expected.cpu()).sum())


def compare(shape: tuple[int, int], dtype: torch.dtype, kind: str) -> dict[str, Any]:
    """How many elements on the device differ from the CPU's and from bitsandbytes'."""
    weight = random(shape, dtype)
    parts = nf4.quantize(weight, kind)
    here = on(DEVICE, parts)
    expected = nf4.dequantize(parts, dtype, kind)
    found = nf4.dequantize(here, dtype, kind)
    again = nf4.quantize(weight.to(DEVICE), kind)
    line: dict[str, Any] = {
        "shape": shape,
        "dtype": str(dtype).removeprefix("torch."),
        "kind": kind,
        "dequantized_differs_from_cpu": different(found, expected),
        "quantized_differs_from_cpu": {name: different(again[name], part) for name, part in parts.items()},
        "linear_relative_error": linear_error(here, expected, kind),
    }
    if LIBRARY:
        line["dequantized_differs_from_bitsandbytes"] = different(found, nf4.dequantize(here, dtype, f"bnb.{kind}"))
        line["quantized_differs_from_bitsandbytes"] = quantized_by_library(weight.to(DEVICE), again, kind)
    return line


def linear_error(parts: dict[str, Tensor], matrix: Tensor, kind: str) -> float:
    """The largest relative difference of output and gradient from those of the plain matrix on the device."""
    matrix = matrix.to(DEVICE)
    inputs = torch.randn(2, 3, matrix.shape[1], device=DEVICE).to(matrix.dtype).requires_grad_()
    again = inputs.detach().requires_grad_()
    output, expected = nf4_linear(inputs, parts, None, kind), torch.nn.functional.linear(again, matrix)
    grad_output = torch.randn_like(output)
    output.backward(grad_output)
    expected.backward(grad_output)
    pairs = ((output, expected), (inputs.grad, again.grad))
    return max(float((one - other).float().norm() / other.float().norm()) for one, other in pairs)


def quantized_by_library(weight: Tensor, parts: dict[str, Tensor], kind: str) -> dict[str, int]:
    """How many codes and statistics differ from bitsandbytes' on the device, whose kernel divides approximately."""
    from bitsandbytes.functional import quantize_4bit

    double = nf4.is_double(kind)
    packed, state = quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
    found = {"weight": packed, "absmax": state.absmax if double else state.absmax.view(torch.int32)}
    if double:
        found["nested_absmax"] = state.state2.absmax.view(torch.int32)
        found["nested_offset"] = state.offset.view(1).view(torch.int32)
    return {name: different(part.view(parts[name].shape), parts[name]) for name, part in found.items()}


def milliseconds(function: Callable[[], Any]) -> float:
    from triton.testing import do_bench

    return float(do_bench(function, warmup=20, rep=100))


def time_one(shape: tuple[int, int], kind: str) -> dict[str, Any]:
    """Milliseconds and GB/s (bytes read and written) to bf16, also of a copy of as many bytes."""
    from shoal.models import nf4_kernel

    parts = nf4.quantize(torch.randn(shape, device=DEVICE, dtype=BF16), kind)
    moved = sum(part.nbytes for part in parts.values()) + shape[0] * shape[1] * 2
    line: dict[str, Any] = {"shape": shape, "kind": kind}

    def record(name: str, function: Callable[[], Any]) -> None:
        taken = milliseconds(function)
        line[name] = {"milliseconds": round(taken, 4), "gigabytes_per_second": round(moved / taken / 1e6)}

    source, target = (torch.empty(moved // 2, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    record("copy", lambda: target.copy_(source))
    record("ours", lambda: nf4.dequantize(parts, BF16, kind))
    if LIBRARY:
        record("bitsandbytes", lambda: nf4.dequantize(parts, BF16, f"bnb.{kind}"))
    chosen = nf4_kernel.BLOCKS, nf4_kernel.WARPS
    expected = nf4.dequantize(parts, BF16, kind)
    for blocks, warps in TILES:
        nf4_kernel.BLOCKS, nf4_kernel.WARPS = blocks, warps
        record(f"ours, {blocks} blocks, {warps} warps", lambda: nf4.dequantize(parts, BF16, kind))
        assert torch.equal(nf4.dequantize(parts, BF16, kind), expected)
    nf4_kernel.BLOCKS, nf4_kernel.WARPS = chosen
    return line


def main(output: Path) -> None:
    found: dict[str, Any] = {
        "device": "cpu" if TINY else torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "bitsandbytes": version("bitsandbytes") if LIBRARY else None,
        "compared": [],
        "timed": [],
    }
    kinds = ("nf4", "nf4-dq")
    for shape, dtype, kind in product(SHAPES, (FP32, BF16, FP16), kinds):
        found["compared"].append(compare(shape, dtype, kind))
        print(json.dumps(found["compared"][-1]), flush=True)
    for shape, kind in () if TINY else product(TIMED, kinds):
        found["timed"].append(time_one(shape, kind))
        print(json.dumps(found["timed"][-1]), flush=True)
    output.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [line for line in found["compared"] if any(line.get(key) for key in MUST_BE_ZERO)]
    if wrong:
        sys.exit(f"{len(wrong)} of {len(found['compared'])} comparisons failed.")
    print("all dequantized matrices are bitwise equal")


if __name__ == "__main__":
    main(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))))
