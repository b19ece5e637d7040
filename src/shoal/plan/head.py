"""The head and the loss: logits are the largest tensor of a pass, and often the peak."""

from dataclasses import dataclass
from math import ceil

from shoal.plan.run import Run
from shoal.plan.terms import Term, group, leaf

# models/loss.py: numbers in one piece of a chunked loss, and of one whose kernel writes the slope over the logits.
CHUNK_LOGITS = 1 << 25
KERNEL_CHUNK_LOGITS = 1 << 28
# A piece without that kernel: in the compute dtype, its slope so too, and four times in fp32 in between.
EAGER_PIECE_FP32 = 16
# The same over a vocabulary cut by tensor parallelism works in place.
CUT_PIECE_FP32 = 4
# torchtune's chunked loss makes its fp32 copies in eight pieces.
UPCAST_PIECES = 8


@dataclass(frozen=True)
class Head:
    """Bytes while the loss is computed, and what stays of it until the blocks' backward begins."""

    peak: Term
    left: Term


def head(run: Run) -> Head:
    """The last stage's logits and loss of one pass."""
    shape, number, cut = run.shape, run.compute_bytes, run.mesh.tp
    tokens = run.tokens
    logits = tokens * shape.vocab / cut
    # The final norm's input and its result, which the head reads; its gradient is as large.
    hidden = tokens * shape.hidden * number
    norm = leaf("final norm", tokens / cut * shape.hidden * run.stream_bytes)
    before = leaf("hidden states", hidden)
    gradient = leaf("hidden states' gradient", hidden)
    matrix = shape.vocab * shape.hidden / cut
    if run.loss == "plain":
        whole = leaf("logits and loss", logits * _plain_bytes(run))
        return Head(group("head", norm, before, whole), group("head", gradient))
    trained = run.trained.embedding if shape.tied else run.trained.head
    slope = matrix * 4 if trained else 0.0
    if run.loss == "fused" and run.traits.fused_rows:
        slope = matrix * number if trained else 0.0
        piece = min(run.traits.fused_rows * shape.vocab / cut, logits) * (number + 4)
    elif run.traits.chunks == "upcast":
        piece = logits * number + logits / UPCAST_PIECES * 12
        slope = 0.0
    else:
        piece = _piece(run, logits)
    weight_gradient = leaf("head's gradient", slope)
    peak = group("head", norm, before, gradient, weight_gradient, leaf("logits of a piece", piece))
    # In the backward pass the gradient is multiplied by the loss's own, and handed on in the compute dtype.
    again = leaf("head's gradient, handed on", matrix * number if slope and not run.traits.fused_rows else 0.0)
    late = group("head", norm, before, gradient, weight_gradient, again)
    return Head(peak if peak.amount >= late.amount else late, group("head", gradient))


def one_kernel(run: Run) -> bool:
    """Whether a plain loss is one kernel."""
    return run.traits.loss_kernel == "always" or (run.traits.loss_kernel == "compiled" and run.compiled)


def over_logits(run: Run) -> bool:
    """Whether a chunked loss is a kernel that writes the slope over the logits: on every GPU, compiled blocks or not,
    unless the vocabulary is cut."""
    return run.loss == "chunked" and run.traits.chunks == "pieces" and run.mesh.tp == 1 and not run.gpu.is_cpu


def _plain_bytes(run: Run) -> float:
    if one_kernel(run):
        return 2.0 * run.compute_bytes
    return run.traits.cut_logit_bytes if run.mesh.tp > 1 else run.traits.logit_bytes


def _piece(run: Run, logits: float) -> float:
    number = run.compute_bytes
    if run.mesh.tp > 1:
        return _even(CHUNK_LOGITS / run.mesh.tp, logits) * (2 * number + CUT_PIECE_FP32)
    if run.loss == "fused" or over_logits(run):
        return _even(KERNEL_CHUNK_LOGITS, logits) * number
    return _even(CHUNK_LOGITS, logits) * (2 * number + EAGER_PIECE_FP32)


def _even(most: float, logits: float) -> float:
    """Logits of a piece: at most so many, and all pieces alike."""
    return logits / ceil(logits / most)
