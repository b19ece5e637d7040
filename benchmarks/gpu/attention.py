"""Time the attention kernels that torch offers, forward and backward, with the memory that each needs.

    PYTHONPATH=src python benchmarks/gpu/attention.py OUTPUT [--only WORD] [--case WORD]

Prints a line of JSON per case and writes them to the file OUTPUT. It needs torch, triton and a GPU; takes about 90
seconds. WORD selects shapes or cases that contain it. A case that a build of torch does not support is recorded with
its error. `error`: the largest difference of the output and of each gradient from attention with a dense mask in fp32,
divided by the largest element. `--tiny` runs what a CPU can at small sizes.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from attention_kernels import DEVICE, SHAPES, TINY, Attention, Shape, candidates, dense_mask, restored, tensors
from torch import Tensor
from torch.nn.attention import SDPBackend

ONLY, CASE = (sys.argv[sys.argv.index(name) + 1] if name in sys.argv else "" for name in ("--only", "--case"))
GIB = 1024**3


def is_bound(shape: Shape, name: str) -> bool:
    """Whether it computes something else than asked for: every key before the query."""
    return name.endswith("causal") and (shape.window is not None or shape.packed)


def reference(shape: Shape, inputs: tuple[Tensor, ...], given: Tensor) -> list[Tensor] | None:
    """Output and gradients with a dense mask in fp32, of the query heads that share the first head of the keys."""
    if shape.dropout:
        return None
    heads = shape.heads // shape.kv_heads
    query, key, value = (
        one[:, :count].detach().float().requires_grad_() for one, count in zip(inputs, (heads, 1, 1), strict=True)
    )
    scores = (query @ key.transpose(-1, -2)) * shape.head**-0.5
    output = scores.masked_fill(~dense_mask(shape), float("-inf")).softmax(-1) @ value
    return [output.detach(), *torch.autograd.grad(output, (query, key, value), given[:, :heads].float())]


def error(expected: list[Tensor] | None, found: list[Tensor]) -> list[float] | None:
    """Of the output, and of the gradients of queries, keys and values."""
    if expected is None:
        return None
    return [
        round(((one[:, : right.shape[1]].float() - right).abs().max() / right.abs().max()).item(), 6)
        for one, right in zip(found, expected, strict=True)
    ]


def milliseconds(function: Callable[[], Any]) -> float:
    if TINY:
        began = time.perf_counter()
        function()
        return round(1000 * (time.perf_counter() - began), 3)
    from triton.testing import do_bench

    return round(float(do_bench(function, warmup=10, rep=60)), 4)


def measure(shape: Shape, attend: Attention, given: Tensor, expected: list[Tensor] | None) -> dict[str, Any]:
    inputs = tensors(shape)

    def both() -> list[Tensor]:
        output = attend(*inputs)
        return [output.detach(), *torch.autograd.grad(output, inputs, given)]

    found = both()
    result: dict[str, Any] = {"error": error(expected, found)}
    del found
    if not TINY:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        output = attend(*inputs)
        result["kept_gib"] = round((torch.cuda.memory_allocated() - held) / GIB, 3)
        torch.autograd.grad(output, inputs, given)
        result["peak_gib"] = round((torch.cuda.max_memory_allocated() - held) / GIB, 3)
        del output
    result["both_ms"] = milliseconds(both)
    result["forward_ms"] = milliseconds(lambda: attend(*inputs))
    return result


def chosen_kernel(shape: Shape) -> str:
    """What SDPA selects by itself, for grouped queries without repeating the keys and with the mask as it comes."""
    query, key, value = tensors(shape)
    grid = dense_mask(shape) if shape.window is not None or shape.packed else None
    number = torch._fused_sdp_choice(
        query, key, value, grid, shape.dropout, grid is None, enable_gqa=shape.heads != shape.kv_heads
    )
    return SDPBackend(number).name


def run(shape: Shape, written: Callable[[dict[str, Any]], None]) -> None:
    given = torch.randn(shape.sequences, shape.length, shape.heads, shape.head, device=DEVICE).to(shape.dtype)
    given = given.transpose(1, 2)
    expected = reference(shape, tensors(shape), given)
    written({"shape": shape.name, "case": "selected", "kernel": chosen_kernel(shape)})
    for name, make in candidates(shape):
        if CASE not in name:
            continue
        torch._dynamo.reset()  # beyond a number of compilations of one function it would run uncompiled
        line: dict[str, Any] = {"shape": shape.name, "case": name}
        began = time.perf_counter()
        try:
            if TINY and ("compiled" in name or "backend" in name or "tiles" in name):
                continue
            line |= measure(shape, make(), given, None if is_bound(shape, name) else expected)
        except Exception as found:  # recorded: the others are still worth knowing
            line["failed"] = f"{type(found).__name__}: {str(found).strip().splitlines()[0] if str(found) else ''}"[:300]
        with suppress(Exception):  # an older torch has none to restore
            restored()
        line["took_s"] = round(time.perf_counter() - began, 1)
        written(line)
        if not TINY:
            torch.cuda.empty_cache()


def main() -> None:
    lines: list[dict[str, Any]] = []
    output = Path(sys.argv[1])

    def written(line: dict[str, Any]) -> None:
        lines.append(line)
        print(json.dumps(line), flush=True)
        output.write_text("".join(json.dumps(one) + "\n" for one in lines))

    device = "cpu" if TINY else torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    written({"device": device, **versions})
    began = time.perf_counter()
    for shape in SHAPES:
        if ONLY in shape.name:
            try:
                run(shape.small if TINY else shape, written)
            except Exception as found:
                written({"shape": shape.name, "failed": f"{type(found).__name__}: {found}"[:300]})
    written({"seconds": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main()
