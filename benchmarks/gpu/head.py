"""Time head and loss, forward and backward, with a vocabulary that tensor cores cannot read and with its padding, and
with few loss tokens.

    PYTHONPATH=src python benchmarks/gpu/head.py OUTPUT

Writes JSON to the file OUTPUT and prints its lines. It needs torch, triton, shoal and a GPU; takes about two minutes.
Fails, after it has written everything, if padding or skipped tokens change the loss or a gradient. `--tiny` runs
everything but the kernel's tiles on a CPU, at small sizes.
"""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.models import cross_entropy
from shoal.models.cross_entropy import IGNORED, Chunks, choose_chunks, even_chunk
from shoal.models.head import padded_vocabulary
from shoal.models.loss import HeadAndLoss

TINY = "--tiny" in sys.argv
DEVICE = torch.device("cpu" if TINY else "cuda")
BF16 = torch.bfloat16
# Sequences, their length, hidden size and vocabulary. The last is aligned: a control.
SHAPES = (
    {"gpt2": (2, 24, 16, 57), "llama3.2-1b": (2, 24, 32, 64)}
    if TINY
    else {"gpt2": (32, 1024, 768, 50257), "llama3.2-1b": (4, 4096, 2048, 128256)}
)
SHARES = (1.0, 0.3)  # of loss tokens
CHUNKS = (1 << 26, 1 << 27, 1 << 28, 1 << 29)
# Columns per iteration of the kernel, and warps.
TILES = [(2048, 8), (4096, 8), (4096, 16), (8192, 16), (8192, 32), (16384, 16), (16384, 32), (32768, 32)]
ALLOWED = 2e-2  # a gradient's relative difference: bf16 results of matmuls that add in another order


def milliseconds(function: Callable[[], Any]) -> float:
    if TINY:
        began = time.perf_counter()
        function()
        return round(1000 * (time.perf_counter() - began), 3)
    from triton.testing import do_bench

    return round(float(do_bench(function, warmup=30, rep=150)), 4)


def random(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


class Case:
    """Hidden states, labels and a head of one shape."""

    def __init__(self, name: str, share: float) -> None:
        sequences, length, width, self.vocabulary = SHAPES[name]
        torch.manual_seed(0)
        self.hidden = random(sequences, length, width).requires_grad_()
        self.labels = torch.randint(0, self.vocabulary, (sequences, length), device=DEVICE)
        self.labels[torch.rand(sequences, length, device=DEVICE) >= share] = IGNORED
        self.loss_tokens = int((self.labels != IGNORED).sum())
        self.head = nn.Linear(width, self.vocabulary, bias=False, device=DEVICE, dtype=BF16)

    def module(self, columns: int | None = None, most: int | None = None) -> HeadAndLoss:
        """With logits of `columns` and chunks of `most` elements; the usual ones by default."""
        found = HeadAndLoss(self.head, "chunked", None)
        usual = choose_chunks(self.head.weight, None)
        chosen = Chunks(usual.measure, most or usual.most, columns or usual.columns)
        found.chunks = lambda weight: chosen  # type: ignore[method-assign]
        return found

    def run(self, compute: Callable[..., Tensor], **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and the gradients of hidden states and head."""
        loss = compute(self.hidden, self.labels, **options)
        return loss.detach(), *torch.autograd.grad(loss / self.loss_tokens, (self.hidden, self.head.weight))

    def compiled(self) -> Callable[..., Tensor]:
        """Plain torch under torch.compile, whose own padding of matmuls is on by default."""

        def compute(hidden: Tensor, labels: Tensor) -> Tensor:
            logits = F.linear(hidden.flatten(0, 1), self.head.weight).float()
            return F.cross_entropy(logits, labels.flatten(), ignore_index=IGNORED, reduction="sum")

        return torch.compile(compute)


def peak_mebibytes(function: Callable[[], Any]) -> int:
    """Allocated by `function` beside what exists."""
    if TINY:
        return 0
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def time_losses(name: str, share: float) -> dict[str, Any]:
    """Head and loss, forward and backward: unpadded, padded, and with tokens skipped."""
    case = Case(name, share)
    padded = padded_vocabulary(case.head.weight)
    sizes = {"unpadded": case.vocabulary} | ({"padded": padded} if padded > case.vocabulary else {})
    ways: dict[str, Callable[[], Any]] = {}
    for way, columns in sizes.items():
        ways[way] = partial(case.run, case.module(columns))
        if share < 1:
            ways[f"{way}, skipping"] = partial(case.run, case.module(columns), loss_tokens=case.loss_tokens)
    reference = ways["unpadded"]()
    line: dict[str, Any] = {"shape": name, "sizes": SHAPES[name], "loss_tokens": share, "padded_vocabulary": padded}
    for way, function in ways.items():
        line[way] = {
            "milliseconds": milliseconds(function),
            "mebibytes": peak_mebibytes(function),
            "relative_differences": [difference(*pair) for pair in zip(function(), reference, strict=True)],
        }
    if not TINY:
        line["compiled plain loss"] = {"milliseconds": milliseconds(partial(case.run, case.compiled()))}
    return line


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def time_matmuls(name: str) -> dict[str, Any]:
    """The three matmuls of one chunk. `strided`: true sizes, with the row stride of the padded logits."""
    sequences, length, width, vocabulary = SHAPES[name]
    padded = padded_vocabulary(torch.empty(vocabulary, 0, dtype=BF16))
    rows = even_chunk(sequences * length, cross_entropy.KERNEL_CHUNK_LOGITS // vocabulary)
    hidden, weight, padded_logits = random(rows, width), random(padded, width), random(rows, padded)
    plain_logits = padded_logits[:, :vocabulary].contiguous()
    ways = {
        "unpadded": (weight[:vocabulary], plain_logits),
        "strided": (weight[:vocabulary], padded_logits[:, :vocabulary]),
        "padded": (weight, padded_logits),
    }
    line: dict[str, Any] = {"shape": name, "rows": rows, "copy of the weight": milliseconds(weight.clone)}
    return line | {way: three_matmuls(hidden, *given) for way, given in ways.items()}


def three_matmuls(hidden: Tensor, weight: Tensor, logits: Tensor) -> dict[str, float]:
    total = torch.zeros(weight.shape, device=DEVICE)
    return {
        "logits": milliseconds(lambda: torch.matmul(hidden, weight.T, out=logits)),
        "hidden gradient": milliseconds(lambda: logits @ weight),
        "weight gradient": milliseconds(lambda: cross_entropy._add_matmul(total, logits.T, hidden)),
    }


def time_vocabularies(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The three matmuls of one chunk, by the vocabulary: multiples of 1, 2, 4, 8, 16 and 128."""
    sequences, length, width, vocabulary = SHAPES[name]
    rows = even_chunk(sequences * length, cross_entropy.KERNEL_CHUNK_LOGITS // vocabulary)
    line: dict[str, Any] = {"shape": name, "rows": rows, "dtype": str(dtype).removeprefix("torch.")}
    for multiple in (1, 2, 4, 8, 16, 128):
        size = -(-vocabulary // multiple) * multiple
        parts = random(rows, width, dtype=dtype), random(size, width, dtype=dtype), random(rows, size, dtype=dtype)
        line[f"{size} tokens"] = three_matmuls(*parts)
    return line


def time_chunks(name: str) -> dict[str, Any]:
    """Head and loss by the number of logits in a chunk."""
    case = Case(name, 1.0)
    ways = {most: partial(case.run, case.module(most=most)) for most in CHUNKS}
    return {"shape": name} | {
        f"{most} logits per chunk": {"milliseconds": milliseconds(way), "mebibytes": peak_mebibytes(way)}
        for most, way in ways.items()
    }


def time_kernel(name: str) -> dict[str, Any]:
    """The kernel of the loss on one chunk, by its tile."""
    from shoal.models import loss_kernel

    sequences, length, _, vocabulary = SHAPES[name]
    padded = padded_vocabulary(torch.empty(vocabulary, 0, dtype=BF16))
    rows = even_chunk(sequences * length, cross_entropy.KERNEL_CHUNK_LOGITS // vocabulary)
    labels = torch.randint(0, vocabulary, (rows,), device=DEVICE)
    line: dict[str, Any] = {"shape": name, "rows": rows}
    chosen = loss_kernel.TILES
    for stored in sorted({vocabulary, padded}):
        logits = random(rows, stored)
        for columns, warps in TILES:
            loss_kernel.TILES = {columns: warps}
            measure = partial(loss_kernel.measure_in_place, logits, labels, vocabulary, IGNORED)
            line[f"{stored} stored, {columns} columns, {warps} warps"] = milliseconds(measure)
    loss_kernel.TILES = chosen
    return line


def main(output: Path) -> None:
    found: dict[str, Any] = {"device": "cpu" if TINY else torch.cuda.get_device_name(), "torch": torch.__version__}
    parts: dict[str, list[Callable[[], dict[str, Any]]]] = {
        "losses": [partial(time_losses, name, share) for name in SHAPES for share in SHARES],
        "matmuls": [partial(time_matmuls, name) for name in SHAPES],
        "vocabularies": [partial(time_vocabularies, "gpt2", dtype) for dtype in (BF16, torch.float32)],
        "chunks": [partial(time_chunks, name) for name in SHAPES],
        "kernel": [] if TINY else [partial(time_kernel, name) for name in SHAPES],
    }
    for part, measures in parts.items():
        found[part] = []
        for measure in measures:
            found[part].append(measure())
            print(json.dumps({"part": part, **found[part][-1]}), flush=True)
            if not TINY:
                torch.cuda.empty_cache()
    output.write_text(json.dumps(found, indent=1) + "\n")
    wrong = [
        (line["shape"], way)
        for line in found["losses"]
        for way, one in line.items()
        if isinstance(one, dict) and max(one.get("relative_differences", [0])) > ALLOWED
    ]
    if wrong:
        sys.exit(f"Loss or gradients differ: {wrong}.")
    print("losses and gradients agree")


if __name__ == "__main__":
    main(Path(next(argument for argument in sys.argv[1:] if not argument.startswith("--"))))
