"""Seconds that one rank computes: matrix products by their shapes, attention, and kernels that only move memory."""

from dataclasses import dataclass

from shoal.catalogue.efficiency import Efficiency, efficiency
from shoal.plan.activations import selected_products
from shoal.plan.blocks import linears, writes_norms_out
from shoal.plan.head import one_kernel, over_logits
from shoal.plan.run import Run
from shoal.plan.states import adapted, stored_bytes

# A product whose inner size is this long reaches half of what a long one does: its tiles are filled and emptied once
# for each, whatever they hold.
INNER_HALF = 256
# Attention kernels do better with long heads.
HEAD_HALF = 16
# Flash attention's backward makes the scores again: five products where the forward has two.
ATTENTION_BACKWARD = 2.5
# Attention with a bias for each distance (ALiBi) has kernels that reach about half of flash attention's speed.
BIASED_ATTENTION = 0.52
# Backward kernels read and write about twice what the forward ones do.
TRAFFIC_BACKWARD = 2.0
# Bytes moved for each logit: a plain loss in some ten kernels, a compiled one in two passes, or our kernel.
PLAIN_LOGIT_TRAFFIC = 38
FUSED_LOGIT_TRAFFIC = 10
KERNEL_LOGIT_TRAFFIC = 7
# Of the memory's bandwidth, a kernel that goes through long tensors from end to end: our AdamW of fp32 weights on an
# H200 moves 34.6 GB in 8.6 ms (benchmarks/gpu/ideas_h200/kernels_wide_stream_4.txt), its norm a little more slowly.
STREAMED = 0.8
# Casting to 8 bits reads 16 and writes 8; the largest number is found by the kernel before.
CAST_TRAFFIC = 3
# The same into two layouts at once.
BOTH_WAYS_TRAFFIC = 4


@dataclass(frozen=True)
class Seconds:
    """Of one kind of work, forward and backward."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class BlockCompute:
    """One block on one rank for one pass."""

    products: Seconds
    attention: Seconds
    moving: Seconds
    recomputed: float

    @property
    def forward(self) -> float:
        return self.products.forward + self.attention.forward + self.moving.forward

    @property
    def backward(self) -> float:
        return self.products.backward + self.attention.backward + self.moving.backward + self.recomputed


def product_seconds(run: Run, rows: float, inner: float, columns: float, *, eight_bit: bool = False) -> float:
    """One matrix product, [rows, inner] × [inner, columns]."""
    reached = efficiency(run.gpu)
    work = 2 * rows * inner * columns
    short = inner / (inner + INNER_HALF)
    rate = run.peak * reached.products
    if eight_bit and run.gpu.fp8:
        rate = run.gpu.fp8 * reached.eight_bit
    number = 1 if eight_bit else run.compute_bytes
    moved = (rows * inner + inner * columns + rows * columns) * number
    return max(work / (rate * short), moved / _bandwidth(run, reached))


def block_compute(run: Run) -> BlockCompute:
    """What a block costs in time, with what is computed again."""
    products, again = _products(run)
    attention, moving = _attention(run), _moving(run)
    share = 1.0 / run.recompute if isinstance(run.recompute, int) else 1.0
    recomputed = 0.0
    if run.recompute == "selective":
        recomputed = again + moving.forward
    elif run.recompute == "cheap" and run.compiled:
        # Written once more before the products that read it; what it is made of is read in the backward pass anyway.
        written = 2 * run.shape.hidden + run.shape.ffn / run.mesh.tp
        recomputed = run.tokens * written * run.compute_bytes / _bandwidth(run)
    elif run.repeats_forward:
        # All but the last matrix: recomputation stops when it has what the backward pass needs, and nothing needs that
        # one's result.
        last = linears(run.shape)[-1]
        spared = product_seconds(run, run.tokens, *last.cut(run.mesh.tp), eight_bit=run.precision == "fp8")
        recomputed = share * (products.forward - spared + attention.forward + moving.forward)
    return BlockCompute(products, attention, moving, recomputed)


def _products(run: Run) -> tuple[Seconds, float]:
    """(the matrices of a block, what selective recomputation makes again of them)."""
    eight_bit = run.precision == "fp8"
    forward = backward = again = 0.0
    matrices = linears(run.shape, joined=run.traits.joins_queries)
    kept = selected_products(run, matrices)
    for index, one in enumerate(matrices):
        inputs, outputs = one.cut(run.mesh.tp)
        ahead = product_seconds(run, run.tokens, inputs, outputs, eight_bit=eight_bit)
        forward += ahead
        backward += product_seconds(run, run.tokens, outputs, inputs, eight_bit=eight_bit)
        if run.trained.blocks:
            backward += run.trained.blocks * product_seconds(run, inputs, run.tokens, outputs, eight_bit=eight_bit)
        again += 0.0 if index in kept else ahead
        if eight_bit and not run.traits.casts_once:
            cast = run.tokens * (inputs + outputs) + inputs * outputs
            forward += cast * CAST_TRAFFIC / _bandwidth(run)
            backward += 2 * cast * CAST_TRAFFIC / _bandwidth(run)
    if eight_bit and run.traits.casts_once:
        read = {one.reads: one.cut(run.mesh.tp)[0] for one in matrices}
        made = sum(one.cut(run.mesh.tp)[1] for one in matrices)
        numbers = sum(one.parameters for one in matrices) / run.mesh.tp
        forward += (run.tokens * sum(read.values()) * BOTH_WAYS_TRAFFIC + numbers * CAST_TRAFFIC) / _bandwidth(run)
        backward += (run.tokens * made + numbers) * BOTH_WAYS_TRAFFIC / _bandwidth(run)
    if run.adapter is not None:
        for one in adapted(run):
            inputs, outputs = one.cut(run.mesh.tp)
            thin = product_seconds(run, run.tokens, inputs, run.adapter.rank)
            thin += product_seconds(run, run.tokens, run.adapter.rank, outputs)
            # Added to the matrix's own result, which is read and written once more.
            thin += 3 * run.tokens * outputs * run.compute_bytes / _bandwidth(run)
            forward, backward = forward + thin, backward + 2 * thin
        if run.adapter.quantize is not None:
            numbers = sum(one.parameters for one in matrices) / run.mesh.tp
            unpacking = numbers * (stored_bytes(run, run.adapter) + run.compute_bytes) / _bandwidth(run)
            forward, backward = forward + unpacking, backward + unpacking
    return Seconds(forward, backward), again


def _attention(run: Run) -> Seconds:
    shape = run.shape
    # Half of the scores, where a token sees those before it. Sliding windows see less still.
    seen = run.length / 2
    if shape.sliding_window and shape.sliding_window < run.length:
        seen = shape.sliding_window * (1 - shape.sliding_window / (2 * run.length))
    if shape.family == "bert":
        seen = run.length
    work = 4 * run.tokens * seen * shape.query_width / run.mesh.tp
    reached = efficiency(run.gpu)
    if run.attention == "eager":
        # Scores are written and read some ten times, whole.
        scores = run.tokens * run.length * shape.heads / run.mesh.tp
        ahead = 2 * work / (run.peak * reached.products) + scores * 30 / _bandwidth(run)
        return Seconds(ahead, 2 * ahead)
    long_heads = (128 + HEAD_HALF) / 128 * shape.head_size / (shape.head_size + HEAD_HALF)
    reached_here = reached.attention * min(1.0, long_heads) * (BIASED_ATTENTION if shape.family == "mpt" else 1.0)
    ahead = work / (run.peak * reached_here)
    return Seconds(ahead, ATTENTION_BACKWARD * ahead)


def _moving(run: Run) -> Seconds:
    """Norms, activation functions, rotations, residual sums: time is what they read and write."""
    shape, number, cut = run.shape, run.compute_bytes, run.mesh.tp
    # The residual stream may be wider than what the matrices compute with.
    hidden, inner = shape.hidden * run.stream_bytes / number, shape.ffn / cut
    turned = (shape.query_width + shape.kv_width) / cut if shape.traits.rotary else 0.0
    gated = shape.traits.gated
    if run.compiled:
        # A norm with the sum before it: the stream and what is added to it are read, it and its norm are written. What
        # is between two products: once.
        narrow = hidden if run.traits.liger_kernels else shape.hidden
        per_token = 4 * (hidden + narrow) / cut + 2 * turned + (3 if gated else 2) * inner
    else:
        written_out = run.traits.written_out_norms and writes_norms_out(shape)
        norm = (15 if written_out else 2) * hidden / cut
        per_token = 2 * (norm + 3 * hidden / cut) + (8 * turned) + (5 if gated else 2) * inner
        # Biases are added by the products themselves; heads are laid out anew for attention and back.
        per_token += 4 * shape.query_width / cut
    if run.dropout:
        per_token += 6 * hidden / cut
    ahead = run.tokens * per_token * number / _bandwidth(run)
    casting = 0.0
    if run.traits.casts_each_use and run.mixed:
        casting = sum(one.parameters for one in linears(shape)) / cut * (run.weight_bytes + number) / _bandwidth(run)
    return Seconds(ahead + casting, TRAFFIC_BACKWARD * ahead + casting)


def head_seconds(run: Run) -> Seconds:
    """Logits and loss of the last stage."""
    shape, cut = run.shape, run.mesh.tp
    tokens, columns = run.tokens, run.shape.vocab / run.mesh.tp
    ahead = product_seconds(run, tokens, shape.hidden, columns)
    back = product_seconds(run, tokens, columns, shape.hidden)
    trained = run.trained.embedding if shape.tied else run.trained.head
    if trained:
        back += product_seconds(run, shape.hidden, tokens, columns)
    fused = one_kernel(run) if run.loss == "plain" else run.loss == "fused" or (run.compiled and cut == 1)
    traffic = FUSED_LOGIT_TRAFFIC if fused else PLAIN_LOGIT_TRAFFIC
    if over_logits(run):
        traffic = KERNEL_LOGIT_TRAFFIC
    moved = tokens * columns * traffic / _bandwidth(run)
    if run.loss == "chunked" and run.traits.chunks == "recomputed":
        back += ahead
    return Seconds(ahead + moved / 2, back + moved / 2)


def optimizer_seconds(run: Run, parameters: float) -> float:
    """The step over `parameters` on a rank: read and write weights, gradients and state; the norm; the clip."""
    weight = run.weight_bytes
    state = {"adamw": 2 * weight, "adamw8bit": 2, "sgd": weight, "lion": weight, "muon": weight}[run.optimizer]
    gradient = run.gradient_bytes or weight
    moved = 2 * weight + gradient + 2 * state
    if run.clips:
        # The norm reads gradients once; a clip of its own reads and writes them again.
        moved += gradient if run.traits.one_pass_step else 3 * gradient
    if run.mixed and not run.sharded:
        moved += run.compute_bytes + (0 if run.traits.one_pass_step else weight)
    streamed = run.traits.one_pass_step and run.optimizer == "adamw"
    seconds = parameters * moved / (run.gpu.memory_bandwidth * STREAMED if streamed else _bandwidth(run))
    if run.optimizer == "muon":
        # Five rounds of three products of the matrix's shorter side.
        short = min(run.shape.hidden, run.shape.ffn)
        seconds += 5 * 3 * 2 * parameters * short / (run.peak * efficiency(run.gpu).products)
    return seconds


def _bandwidth(run: Run, reached: Efficiency | None = None) -> float:
    return run.gpu.memory_bandwidth * (reached or efficiency(run.gpu)).bandwidth
