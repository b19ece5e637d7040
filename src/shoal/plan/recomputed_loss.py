"""Seconds of TRL's loss beside its matmuls: parts of 256 tokens, each of which is computed again in the backward pass
(`_chunk` and `_chunked_cross_entropy_loss` in trl/trainer/sft_trainer.py, since April 2026)."""

from shoal.plan.eager import SOFTMAX_MOVED, Kernel, cast, kernel_seconds
from shoal.plan.kernels import STREAMED, Seconds
from shoal.plan.run import Run

# _CHUNKED_LM_HEAD_CHUNK_SIZE.
ROWS = 256


def weight_seconds(run: Run, tokens: float, matrix: float, *, trained: bool) -> Seconds:
    """What every part does with the head's weight, which has `matrix` elements. Autocast casts it, and keeps the copy
    of one that is trained for the whole forward pass, but not when parts are computed again; and the gradient of a part
    is added to that of the others."""
    parts, rate = tokens / ROWS, run.gpu.memory_bandwidth * STREAMED
    autocast = run.traits.casts_per_use and run.mixed
    copied = matrix * (4 + run.compute_bytes) / rate if autocast else 0.0
    if not trained:
        return Seconds(parts * copied, parts * copied)
    return Seconds(copied, parts * (copied + matrix * 3 * run.compute_bytes / rate))


def loss_seconds(run: Run, logits: float) -> float:
    """The softmax of all parts, forward, again and backward, with what is logged: the largest logit, and the entropy,
    which is no part of the gradient but computed again too."""
    logged = [Kernel(1, run.head_bytes), Kernel(1, 8), Kernel(1, 12), Kernel(1, 4)]
    once = [*cast(1, run.head_bytes, 4), Kernel(1, SOFTMAX_MOVED), *logged]
    behind = [Kernel(1, 4), Kernel(1, SOFTMAX_MOVED), *cast(1, 4, run.head_bytes)]
    return kernel_seconds(run, [*once, *once, *behind], logits)
