"""Grouped matmuls of a mixture's experts on this GPU, beside one matmul of as many FLOPs and the same inner dimension.

`python benchmarks/gpu/grouped_matmuls.py OUTPUT_FOLDER`: the matmuls of `transformers.integrations.moe`, forward and
backward, at the sizes of several models, with experts that get equally many tokens and with experts that do not. Writes
grouped_matmuls.json: median milliseconds and TFLOP/s. Takes about a minute; `--tiny` runs on a CPU.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEED = 1234
# Of a Dirichlet distribution over experts: from one to the next, the number of tokens varies by half of its mean.
UNEVEN = 4.0


@dataclass(frozen=True)
class Experts:
    """The sizes of a mixture of experts, and the tokens of a micro-batch."""

    name: str
    count: int
    routed: int
    hidden: int
    width: int
    tokens: int


CASES = [
    Experts("qwen3-moe-1.5b", 32, 4, 1024, 768, 8192),
    Experts("qwen3-30b-a3b", 128, 8, 2048, 768, 4096),
    Experts("qwen3-30b-a3b", 128, 8, 2048, 768, 16384),
    Experts("olmoe-7b", 64, 8, 2048, 1024, 8192),
    Experts("gpt-oss-20b", 32, 4, 2880, 2880, 8192),
    Experts("deepseek-v2-lite", 64, 6, 2048, 1408, 8192),
    Experts("mixtral-8x7b", 8, 2, 4096, 14336, 8192),
]
TINY = [Experts("tiny", 4, 2, 64, 32, 128)]


def measure(experts: Experts, device: str, *, even: bool) -> Iterator[dict[str, Any]]:
    """The grouped matmuls of gate and up together and of down, and as many FLOPs in one matmul."""
    rows = experts.tokens * experts.routed
    ends = group_ends(experts, rows, device, even=even)
    for layer, inner, outer in (
        ("gate, up", experts.hidden, 2 * experts.width),
        ("down", experts.width, experts.hidden),
    ):
        inputs, grads = random(rows, inner, device=device), random(rows, outer, device=device)
        weights, weight = random(experts.count, outer, inner, device=device), random(outer, inner, device=device)
        grouped: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=inputs, w=weights: torch._grouped_mm(x, w.transpose(-2, -1), offs=ends),
            "grad_input": lambda g=grads, w=weights: torch._grouped_mm(g, w, offs=ends),
            "grad_weight": lambda g=grads, x=inputs: torch._grouped_mm(g.transpose(-2, -1), x, offs=ends),
        }
        single: dict[str, Callable[[], Tensor]] = {
            "forward": lambda x=inputs, w=weight: x @ w.T,
            "grad_input": lambda g=grads, w=weight: g @ w,
            "grad_weight": lambda g=grads, x=inputs: g.T @ x,
        }
        for name, function in grouped.items():
            seconds, alone = median_seconds(function, device), median_seconds(single[name], device)
            flops = 2 * rows * inner * outer
            yield {
                **asdict(experts),
                "even": even,
                "layer": layer,
                "matmul": name,
                "inner": {"forward": inner, "grad_input": outer, "grad_weight": rows / experts.count}[name],
                "milliseconds": round(seconds * 1e3, 4),
                "tflops": round(flops / seconds / 1e12, 1),
                "tflops_of_one": round(flops / alone / 1e12, 1),
            }


def group_ends(experts: Experts, rows: int, device: str, *, even: bool) -> Tensor:
    """Where the rows of each expert end."""
    shares = torch.ones(experts.count)
    if not even:
        shares = torch.distributions.Dirichlet(torch.full((experts.count,), UNEVEN)).sample()
    ends = (shares.cumsum(0) / shares.sum() * rows).round().to(torch.int32)
    ends[-1] = rows
    return ends.to(device)


def random(*shape: int, device: str) -> Tensor:
    return torch.randn(shape, device=device, dtype=torch.bfloat16)


def median_seconds(function: Callable[[], Tensor], device: str) -> float:
    if device == "cuda":
        from triton.testing import do_bench

        return float(do_bench(function, warmup=20, rep=80, return_mode="median")) / 1e3
    found = []
    for _ in range(3):
        began = time.perf_counter()
        function()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(SEED)
    found = []
    for experts in TINY if arguments.tiny else CASES:
        for even in (True, False):
            for one in measure(experts, device, even=even):
                found.append(one)
                print(json.dumps(one), flush=True)
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    arguments.output.mkdir(parents=True, exist_ok=True)
    record = {"device": name, "torch": torch.__version__, "matmuls": found}
    (arguments.output / "grouped_matmuls.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
