"""Memory of lm_head and loss: logits are the largest tensor of a step, and often the peak."""

from dataclasses import dataclass
from math import ceil, floor, log2

from shoal.plan.memory.states import dequantized_bytes, has_quantized_head
from shoal.plan.run.run import Run
from shoal.plan.terms import GIB, Term, group, leaf

# models/cross_entropy.py: logits per chunk of a chunked loss, and of one whose kernel overwrites the logits with their
# gradient.
CHUNK_LOGITS = 1 << 25
KERNEL_CHUNK_LOGITS = 1 << 28
# Without that kernel, fp32 bytes per logit of a chunk, beside logits and gradient in the compute dtype.
EAGER_CHUNK_FP32 = 16
# The same for a vocabulary sharded by tensor parallelism, which works in place.
SHARDED_CHUNK_FP32 = 4
# The bytes of a row of logits that tensor cores can read, and the multiple to which other vocabularies are padded.
ALIGNED_BYTES = 16
VOCABULARY_MULTIPLE = 128
# The log-softmax in fp32, and two gradients.
LOSS_BYTES = 12
# Tensors as wide as the hidden states in the head of a masked language model: its input, which is gathered, and the
# outputs of its linear layer, activation and norm.
HEAD_TRANSFORM = 4
# The year whose wheels have PyTorch 2.5 and later.
FUSED_LABELS = 2024
# The year whose wheels have PyTorch 2.6 and later.
REUSED_LOGITS = 2025
# A part of Unsloth's fused loss: as many tokens, a power of two, as have at most so many logits; their least and most.
PART_LOGITS, PART_ROWS = 512 * 151936, (512, 4096)
# torchtune's chunked losses upcast logits to fp32 in eight chunks.
UPCAST_CHUNKS = 8


@dataclass(frozen=True)
class Head:
    """Bytes while the loss is computed, what remains when the backward pass enters the blocks, and before that, in the
    matmuls of the head's backward pass."""

    peak: Term
    remaining: Term
    matmuls: Term


def head(run: Run) -> Head:
    """Logits and loss of one micro-batch in the last stage."""
    shape, itemsize, tp = run.shape, run.compute_bytes, run.mesh.tp
    tokens = run.tokens
    columns = logit_columns(run)
    logits = run.head_tokens * columns
    # The final norm's input, and its output, which the head reads and whose gradient is as large.
    hidden = tokens * shape.hidden * itemsize
    norm = leaf("final norm", tokens / tp * shape.hidden * run.residual_bytes)
    before = leaf("hidden states", hidden)
    gradient = leaf("hidden states gradient", hidden)
    matrix = columns * shape.hidden
    padded = leaf("padded head weight", matrix * itemsize if is_padded(run) else 0.0)
    trained = run.trained.embedding if shape.tied else run.trained.head
    if run.loss == "plain":
        whole = leaf("logits and loss", logits * _plain_bytes(run))
        # If no tokens are gathered, the input is the hidden states, and the last norm is in the place of the final one.
        tensors = HEAD_TRANSFORM if run.head_share < 1 else (HEAD_TRANSFORM - 2) * shape.traits.head_transform
        chosen = leaf("head transform", tensors * run.head_tokens * shape.hidden * itemsize)
        # It is dequantized again in the backward pass, when one of the logits' fp32 tensors is gone.
        again = matrix * dequantized_bytes(run) - 4 * logits if has_quantized_head(run) else 0.0
        dequantized = leaf("dequantized head weight", max(0.0, again))
        # Autocast casts a head that is in fp32, and the backward pass needs the copy.
        upcast = run.adapter is not None and run.adapter.upcasts and run.autocasts
        copy = leaf("head weight in compute dtype", matrix * itemsize if upcast else 0.0)
        peak = group("head", norm, before, padded, chosen, whole, dequantized, copy)
        # Then the matmuls of the backward pass, which read the gradient of the logits, and return the weight's.
        held = returned_bytes(run) if run.traits.holds_outputs else 0.0
        matmuls = group(
            "head",
            norm,
            before,
            padded,
            chosen,
            leaf("logits gradient", logits * (itemsize + held)),
            # Where a matmul adds it up, autograd is given a tensor that stays (`buffers.dummy_gradients`).
            leaf("head weight gradient", matrix * itemsize if trained and not run.keeps_dummies else 0.0),
            gradient,
        )
        return Head(peak, group("head", gradient), matmuls)
    head_gradient = matrix * 4 if trained else 0.0
    if run.loss == "fused" and run.traits.fused_rows:
        head_gradient = matrix * itemsize if trained else 0.0
        if run.traits.sums_head_gradient:  # beside it, that of a part, and in fp32
            head_gradient *= (2 * itemsize + 4) / itemsize
        # A compiled part writes the gradient of its logits over them.
        each = {"4 GiB": itemsize, "256 MiB": 4}.get(str(run.traits.fused_rows), itemsize + 4)
        chunk = fused_rows(run) * columns * each
    elif run.traits.chunks == "projected" and not run.compiled:
        # The log-softmax of every chunk, the two gradients of one, and the hidden states of the tokens that have
        # labels, which are gathered first.
        chunk = 4 * logits + 8 * logits / UPCAST_CHUNKS + run.head_tokens * shape.hidden * itemsize
        head_gradient = matrix * itemsize if trained else 0.0
    elif run.traits.chunks in ("upcast", "projected"):
        # A compiled chunk reads its logits and writes their gradient, without fp32 copies. Otherwise the log-softmax of
        # every chunk is saved until the backward pass, which has two gradients of a chunk at a time.
        chunk = logits * itemsize + logits / UPCAST_CHUNKS * (itemsize if run.compiled else 8)
        chunk += 0.0 if run.compiled else 4 * logits
        head_gradient = 0.0
    else:
        chunk = _chunk_bytes(run, logits)
    weight_gradient = leaf("head weight gradient", head_gradient)
    cast = 0.0
    if run.fp8_head:  # the weight in two layouts, and the gradient of a chunk of logits
        cast = 2 * matrix + _chunk_logits(run, logits)
    chunk_leaves = leaf("logits chunk", chunk), leaf("fp8 weight and gradient", cast)
    peak = group("head", norm, before, gradient, padded, weight_gradient, *chunk_leaves)
    # The backward pass scales the gradient by the incoming one, and returns it in the compute dtype.
    returned = leaf(
        "head weight gradient in compute dtype",
        matrix * itemsize if head_gradient and not run.traits.fused_rows else 0.0,
    )
    late = group("head", norm, before, gradient, weight_gradient, returned)
    return Head(peak if peak.amount >= late.amount else late, group("head", gradient), group("head"))


def loss_in_forward(run: Run) -> Term:
    """What of a plain loss's peak is there in the forward pass already: of three tensors in fp32, two and the logits in
    the compute dtype, unless the model copies them."""
    peak = head(run).peak
    copies = run.traits.shifts_logits or run.traits.logit_bytes != LOSS_BYTES or is_fused_loss(run)
    less = 0 if copies else 4 - run.compute_bytes
    unneeded = less * run.head_tokens * logit_columns(run)
    parts = [leaf(one.name, one.amount - unneeded * (one.name == "logits and loss")) for one in peak.parts]
    return group("head", *parts)


def fused_rows(run: Run) -> float:
    """Tokens whose logits a fused loss computes at a time."""
    rows, tokens = run.traits.fused_rows, run.head_tokens
    if rows == "liger":
        return min(tokens, 1 << ceil(log2(ceil(tokens / ceil(run.shape.vocab / run.shape.hidden)))))
    if rows == "4 GiB":
        parts = 4 * tokens * run.shape.vocab / (4 * GIB)
        return tokens if parts <= 1 else ceil(tokens / (4 * ceil(parts / 4)))
    if rows == "256 MiB":
        least, most = PART_ROWS
        return min(tokens, min(max(1 << floor(log2(PART_LOGITS / run.shape.vocab)), least), most))
    return min(rows or tokens, tokens)


def returned_bytes(run: Run) -> float:
    """Bytes per logit of those that the model returns, where the loss is plain: what its peak has beside three fp32
    tensors. transformers returned them in fp32 before version 4.46."""
    if is_fused_loss(run):
        return float(run.compute_bytes)
    return run.traits.logit_bytes + run.head_bytes - run.compute_bytes - LOSS_BYTES


def logit_columns(run: Run) -> float:
    """The logits of a token on a rank, as they are computed."""
    size = run.shape.vocab / run.mesh.tp
    return ceil(size / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE if is_padded(run) else size


def is_aligned(run: Run) -> bool:
    """Whether tensor cores can read the true vocabulary of every rank. In fp32 they are not used."""
    return run.compute_bytes > 2 or run.shape.vocab * run.compute_bytes % (ALIGNED_BYTES * run.mesh.tp) == 0


def is_padded(run: Run) -> bool:
    """Whether the head is computed at a padded vocabulary."""
    if run.shape.traits.head_transform:  # the model's own modules compute it
        return False
    return run.traits.pads_vocabulary and not is_aligned(run) and not run.gpu.is_cpu


def is_fused_loss(run: Run) -> bool:
    """Whether a plain loss is one kernel."""
    return run.traits.loss_kernel == "always" or (run.traits.loss_kernel == "compiled" and run.compiled)


def overwrites_logits(run: Run) -> bool:
    """Whether a chunked loss uses the kernel that overwrites the logits with their gradient: on every GPU, compiled
    blocks or not, unless the vocabulary is sharded."""
    return run.loss == "chunked" and run.traits.chunks == "chunked" and run.mesh.tp == 1 and not run.gpu.is_cpu


def label_bytes(run: Run) -> float:
    """Bytes per logit of the labels of a compiled loss: before PyTorch 2.5 a sparse matrix in the dtype of the softmax
    (pytorch pull request 129043)."""
    compiled = run.traits.loss_kernel == "compiled" and run.compiled
    if not (compiled and 0 < run.traits.software < FUSED_LABELS):
        return 0.0
    return 4.0 if run.mixed else float(run.compute_bytes)


def _reuses_logits(run: Run) -> bool:
    """Whether the backward pass of a model that is compiled with its loss writes over the logits that it has saved:
    since PyTorch 2.6, unless they are returned (benchmarks/gpu/compiled_loss_h200)."""
    earlier = 0 < run.traits.software < REUSED_LOGITS
    return run.traits.compiles_loss and run.compiled and not run.traits.returns_logits and not earlier


def _plain_bytes(run: Run) -> float:
    if is_fused_loss(run):
        both = 1.0 if run.traits.loss_in_place or _reuses_logits(run) else 2.0
        # Zeros in place of the gradient that returned logits do not have.
        zeros = run.compute_bytes if run.traits.compiles_loss and run.traits.returns_logits and run.compiled else 0.0
        return max(run.traits.kernel_logit_bytes, both * run.compute_bytes) + zeros + label_bytes(run)
    # A head in fp32 returns logits in it.
    if run.splits_head:  # logits, log-softmax, and of one part two gradients
        return 8 + 8 / run.head_parts
    wide = float(run.head_bytes - run.compute_bytes)
    if run.traits.peft and run.shape.traits.post_norm and not run.in_autocast:  # transformers' encoders upcast nothing
        wide -= LOSS_BYTES * (1 - run.compute_bytes / 4)
    return wide + (run.traits.sharded_logit_bytes if run.mesh.tp > 1 else run.traits.logit_bytes)


def _chunk_bytes(run: Run, logits: float) -> float:
    itemsize, stored = run.compute_bytes, _chunk_logits(run, logits)
    if run.mesh.tp > 1:
        return stored * (2 * itemsize + SHARDED_CHUNK_FP32)
    return stored * (itemsize if _is_kernel(run) else 2 * itemsize + EAGER_CHUNK_FP32)


def _chunk_logits(run: Run, logits: float) -> float:
    if run.mesh.tp > 1:
        return _even(CHUNK_LOGITS / run.mesh.tp, logits)
    return _even(KERNEL_CHUNK_LOGITS if _is_kernel(run) else CHUNK_LOGITS, logits)


def _is_kernel(run: Run) -> bool:
    return run.loss == "fused" or overwrites_logits(run)


def _even(most: float, logits: float) -> float:
    """Logits per chunk: at most `most`, with chunks of equal size."""
    return logits / ceil(logits / most)
