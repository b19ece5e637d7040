"""Kernel times of parts of a step on this GPU: the loss, the head gradient, and fused or separate matmuls.

    PYTHONPATH=src python benchmarks/gpu/microbenchmarks.py

Prints JSON lines with the median milliseconds of the kernels alone, at the sizes of the llama3.2-1b shape. Takes about
a minute.
"""

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.testing import do_bench

from shoal.models.cross_entropy import IGNORED
from shoal.models.loss_kernel import measure_in_place, scale_and_cast

HIDDEN, VOCABULARY = 2048, 128256
FUSED = {"query, key, value": (2048, 512, 512), "key, value": (512, 512), "gate, up": (8192, 8192)}


def cross_entropy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of the logits in plain torch, for torch.compile."""
    log_probabilities = torch.log_softmax(logits.float(), dim=-1)
    counted = labels != IGNORED
    label = log_probabilities.gather(1, labels.clamp_min(0)[:, None]).squeeze(1)
    hit = torch.arange(logits.shape[1], device=logits.device) == labels[:, None]
    probabilities = log_probabilities.exp()
    grad_logits = (torch.where(hit, probabilities - 1, probabilities) * counted[:, None]).to(logits.dtype)
    return -torch.where(counted, label, 0.0).sum(), grad_logits


def report(name: str, **milliseconds: Any) -> None:
    print(json.dumps({"name": name, **milliseconds}), flush=True)


def milliseconds(function: Callable[[], Any]) -> float:
    return round(do_bench(function, warmup=10, rep=60), 3)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=dtype)


def loss(rows: int = 2048) -> None:
    logits, labels = 2 * random(rows, VOCABULARY), torch.randint(0, VOCABULARY, (rows,), device="cuda")
    compiled = torch.compile(cross_entropy)
    report(
        f"loss and gradient of {rows} rows",
        compiled=milliseconds(lambda: compiled(logits, labels)),
        kernel=milliseconds(lambda: measure_in_place(logits, labels, VOCABULARY, IGNORED)),
    )
    gradient, factor = random(VOCABULARY, HIDDEN, dtype=torch.float32), torch.tensor(0.5, device="cuda")
    rounded = torch.empty_like(gradient, dtype=torch.bfloat16)
    report(
        "head gradient, scaled and cast",
        torch=milliseconds(lambda: torch.mul(gradient, factor, out=rounded)),
        kernel=milliseconds(lambda: scale_and_cast(gradient, factor, torch.bfloat16)),
    )


def fused(tokens: int) -> None:
    inputs = random(tokens, HIDDEN)
    for name, widths in FUSED.items():
        weights, grads = [random(width, HIDDEN) for width in widths], [random(tokens, width) for width in widths]
        weight, grad = torch.cat(weights), torch.cat(grads, 1)
        report(
            f"{name}, {tokens} tokens",
            forward_separate=milliseconds(lambda weights=weights: [inputs @ one.T for one in weights]),
            forward_fused=milliseconds(lambda weight=weight: inputs @ weight.T),
            inputs_separate=milliseconds(
                lambda grads=grads, weights=weights: [g @ w for g, w in zip(grads, weights, strict=True)]
            ),
            inputs_fused=milliseconds(lambda grad=grad, weight=weight: grad @ weight),
            weights_separate=milliseconds(lambda grads=grads: [one.T @ inputs for one in grads]),
            weights_fused=milliseconds(lambda grad=grad: grad.T @ inputs),
        )


if __name__ == "__main__":
    loss()
    fused(16384)
    fused(32768)
