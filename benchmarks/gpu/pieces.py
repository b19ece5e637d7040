"""What pieces of a step take on this GPU: the loss, its last product, and matrices joined or apart. Prints JSON lines.

    PYTHONPATH=src python benchmarks/gpu/pieces.py

Milliseconds of kernels alone, each the median of many runs; sizes are those of the llama3.2-1b shape. A minute.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from shoal.models.loss import IGNORED
from shoal.models.loss_kernel import measure_in_place, scale_and_cast

HIDDEN, VOCABULARY = 2048, 128256
JOINED = {"query, key, value": (2048, 512, 512), "key, value": (512, 512), "gate, up": (8192, 8192)}


def written_out(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and its slope in torch's words, for the compiler."""
    logarithms = torch.log_softmax(logits.float(), dim=-1)
    counted = labels != IGNORED
    target = logarithms.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    hit = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    shares = logarithms.exp()
    slope = (torch.where(hit, shares - 1, shares) * counted[:, None]).to(logits.dtype)
    return -torch.where(counted, target, 0.0).sum(), slope


def say(piece: str, **milliseconds: Any) -> None:
    print(json.dumps({"piece": piece, **milliseconds}), flush=True)


def took(function: Callable[[], Any]) -> float:
    return round(do_bench(function, warmup=10, rep=60), 3)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def loss(rows: int = 2048) -> None:
    logits, labels = 2 * random(rows, VOCABULARY), torch.randint(0, VOCABULARY, (rows,), device="cuda")
    compiled = torch.compile(written_out)
    say(
        f"loss and slope of {rows} rows",
        compiled=took(lambda: compiled(logits, labels)),
        kernel=took(lambda: measure_in_place(logits, labels, IGNORED)),
    )
    gradient, factor = random(VOCABULARY, HIDDEN, dtype=torch.float32), torch.tensor(0.5, device="cuda")
    rounded = torch.empty_like(gradient, dtype=torch.bfloat16)
    say(
        "head's gradient times a number, rounded",
        torch=took(lambda: torch.mul(gradient, factor, out=rounded)),
        kernel=took(lambda: scale_and_cast(gradient, factor, torch.bfloat16)),
    )


def joined(tokens: int) -> None:
    inputs = random(tokens, HIDDEN)
    for name, widths in JOINED.items():
        weights, slopes = [random(width, HIDDEN) for width in widths], [random(tokens, width) for width in widths]
        weight, slope = torch.cat(weights), torch.cat(slopes, 1)
        say(
            f"{name}, {tokens} tokens",
            forward_apart=took(lambda weights=weights: [inputs @ one.T for one in weights]),
            forward_joined=took(lambda weight=weight: inputs @ weight.T),
            inputs_apart=took(
                lambda slopes=slopes, weights=weights: [s @ w for s, w in zip(slopes, weights, strict=True)]
            ),
            inputs_joined=took(lambda slope=slope, weight=weight: slope @ weight),
            weights_apart=took(lambda slopes=slopes: [one.T @ inputs for one in slopes]),
            weights_joined=took(lambda slope=slope: slope.T @ inputs),
        )


if __name__ == "__main__":
    loss()
    joined(16384)
    joined(32768)
