"""Times of the kernels of attention whose scores are materialized, PyTorch's own, one by one.

    python benchmarks/gpu/score_kernels.py FILE [--tiny]

For each dtype and number of keys: matmuls of queries and keys, and of probabilities and values, with their gradients;
scale, mask, softmax, dropout, casts, and their backward passes. Times are medians of the profiler's, in picoseconds per
score; each case has 2^26 scores or more, so that they do not stay in the cache.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

HEADS, WIDTH = 16, 64
KEYS = (128, 384, 512, 1024, 2048, 4096)
SCORES = 1 << 26


def kernels(batch: int, keys: int, dtype: torch.dtype, device: str) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every kernel by its name."""
    shape = (batch, HEADS, keys, keys)
    scores = torch.randn(shape, device=device).to(dtype)
    wide = scores.float()
    probabilities = torch.softmax(wide, -1)
    narrow = probabilities.to(dtype)
    padding = torch.zeros(batch, 1, 1, keys, device=device, dtype=dtype)
    causal = torch.zeros(batch, 1, keys, keys, device=device, dtype=dtype)
    one = [torch.randn(batch, HEADS, keys, WIDTH, device=device).to(dtype) for _ in range(3)]
    queries, values, gradient = one
    transposed = torch.randn(batch, HEADS, keys, WIDTH, device=device).to(dtype).transpose(-1, -2)
    yield "matmul of queries and keys", lambda: queries @ transposed
    yield "matmul of probabilities and values", lambda: narrow @ values
    yield "matmul of the gradient and values", lambda: gradient @ values.transpose(-1, -2)
    yield "matmul of transposed scores", lambda: scores.transpose(-1, -2) @ gradient
    yield "scale", lambda: scores * 0.125
    yield "divide", lambda: scores / 8.0
    yield "padding mask", lambda: scores + padding
    yield "causal mask", lambda: scores + causal
    yield "widen", lambda: scores.float()
    yield "narrow", lambda: wide.to(dtype)
    yield "softmax", lambda: torch.softmax(scores, -1)
    yield "softmax in fp32", lambda: torch.softmax(wide, -1)
    yield "dropout", lambda: torch.nn.functional.dropout(narrow, 0.1)
    kept = torch.empty(shape, device=device, dtype=torch.bool).fill_(True)
    yield "dropout backward", lambda: torch.ops.aten.native_dropout_backward(scores, kept, 1.1)
    yield "softmax backward", lambda: torch.ops.aten._softmax_backward_data(scores, narrow, -1, dtype)
    yield (
        "softmax backward in fp32",
        lambda: torch.ops.aten._softmax_backward_data(wide, probabilities, -1, torch.float32),
    )
    if dtype == torch.float16 and device == "cuda":
        yield "softmax to fp32", lambda: torch.softmax(scores, -1, dtype=torch.float32)
        yield (
            "softmax backward from fp32",
            lambda: torch.ops.aten._softmax_backward_data(wide, probabilities, -1, dtype),
        )


def seconds(run: Callable[[], object], device: str) -> float:
    """The median of five calls after two."""
    if device == "cpu":
        run()
        return 0.0
    found = []
    for index in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        # The host is ahead of the device, so that launches do not count.
        torch.cuda._sleep(2_000_000)
        begin.record()
        result = run()
        end.record()
        torch.cuda.synchronize()
        del result
        if index >= 2:
            found.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of the kernels of materialized attention scores.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tiny", action="store_true", help="small tensors on a CPU: checks that every kernel runs")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    found: list[dict[str, str | int | float]] = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for keys in (16,) if args.tiny else KEYS:
            batch = 2 if args.tiny else max(2, SCORES // (HEADS * keys * keys))
            count = batch * HEADS * keys * keys
            for name, run in kernels(batch, keys, dtype, device):
                each = round(seconds(run, device) / count * 1e12, 4)
                found.append({"kernel": name, "dtype": str(dtype)[6:], "keys": keys, "batch": batch, "ps": each})
            if device == "cuda":
                torch.cuda.empty_cache()
        args.file.write_text(
            json.dumps({"device": gpu_name(), "heads": HEADS, "width": WIDTH, "kernels": found}) + "\n"
        )
    print(f"{len(found)} times in {args.file}")


def gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
