"""Compute time of one rank: matmuls by their shapes, attention, and memory-bound elementwise kernels."""

from dataclasses import dataclass

from shoal.catalogue.attention import Path, attention_speed
from shoal.catalogue.efficiency import MULTIPROCESSORS, Efficiency, efficiency, relative_rate
from shoal.catalogue.optimizers import find_optimizer
from shoal.plan.activations import selected_matmuls
from shoal.plan.blocks import linears
from shoal.plan.head import is_aligned, is_fused_loss, is_padded, logit_columns, overwrites_logits
from shoal.plan.packed import packed_linears, summed_gradients
from shoal.plan.run import Adapter, Run
from shoal.plan.states import adapted, stored_bytes

# Matmuls in fp32, which do not use tensor cores, reach more of their lower peak.
FP32_MATMULS = 1.1
# How much longer the three matmuls of a head take if its vocabulary is not aligned: odd as GPT-2's, or even. Measured
# on an H200: benchmarks/gpu/head_h200. Single elements are loaded at the same rate by every multiprocessor, so this is
# less where their peak is lower.
ODD, EVEN = 5.3, 2.5
# Elements of the output that a multiprocessor computes at a time, 128 × 256, and inner dimensions from which on several
# multiprocessors share a tile. When the last tiles are computed, some multiprocessors wait: as if there were a third of
# a wave of tiles more. The shares of the peak are those of twenty waves and more.
TILE, SHARED_INNER, TAIL, WAVES = 128 * 256, 2048, 0.3, 20
# Smaller tiles, by how many of them are in a large one, and their speed.
TILES = ((1, 1.0), (2, 0.92), (8, 0.75))
# Attention kernels reach more of the peak with larger head dimensions; this one reaches half.
HEAD_HALF = 16
# The backward pass of flash attention recomputes the scores: five matmuls where the forward pass has two.
ATTENTION_BACKWARD = 2.5
# Attention kernels with ALiBi reach about half of flash attention's speed.
BIASED_ATTENTION = 0.52
# Flash attention 2 on Hopper, relative to cuDNN's kernels: benchmarks/gpu/attention_h200.
FLASH_2 = 0.6
# Bytes moved per score that is materialized: by eager kernels, with a softmax in fp32; by a fused or compiled one; and
# by dropout, with its mask.
EAGER_SCORES, FUSED_SCORES, DROPPED_SCORES = 26, 8, 5
# Backward kernels read and write about twice what the forward ones do.
TRAFFIC_BACKWARD = 2.0
# The gradient of a bias is a sum over tokens, which reads the gradient of its layer's output once more.
BIAS_TRAFFIC = 1
# Bytes moved per logit: an eager loss in about ten kernels, a compiled one in two, or our kernel.
PLAIN_LOGIT_TRAFFIC = 38
FUSED_LOGIT_TRAFFIC = 10
KERNEL_LOGIT_TRAFFIC = 7
# Share of the memory bandwidth that a streaming kernel over long tensors reaches: our AdamW of fp32 weights on an H200
# moves 34.6 GB in 8.6 ms (benchmarks/gpu/ideas_h200/kernels_wide_stream_4.txt); its norm is a little slower.
STREAMED = 0.8
# Adafactor's update has the size of the gradient and is computed in about this many reads and writes of fp32: its
# square, two means, their outer product, the quotient, its norm, the clipped and scaled update.
FACTORED_PASSES = 14
# The same of torch's foreach AdamW, one kernel for each operation: decay 2, the first moment 3, the second 2 + 3, its
# root 2, divided 2, with epsilon 2, and the update 4 (_multi_tensor_adam in torch/optim/adam.py).
FOREACH_PASSES = 20
# Bytes per element of a cast to fp8: reads 16 bits, writes 8; the preceding kernel computes the absolute maximum.
CAST_TRAFFIC = 3
# The same into two layouts, plain and transposed, at once.
TWO_LAYOUT_CAST_TRAFFIC = 4
# Seconds that a tensor cast to fp8 costs whatever its size: three kernels (the last stage of its maximum, its scale,
# the cast) of at least 2.5 microseconds each.
CAST_SECONDS = 7.5e-6


@dataclass(frozen=True)
class Seconds:
    """Seconds of one kind of work in the forward and the backward pass."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class BlockCompute:
    """Seconds of one block on one rank per micro-batch."""

    matmuls: Seconds
    attention: Seconds
    elementwise: Seconds
    recomputed: float

    @property
    def forward(self) -> float:
        return self.matmuls.forward + self.attention.forward + self.elementwise.forward

    @property
    def backward(self) -> float:
        return self.matmuls.backward + self.attention.backward + self.elementwise.backward + self.recomputed


def reached_by(run: Run) -> Efficiency:
    """The shares of the device's peaks that this run's software reaches."""
    return efficiency(run.gpu, software=run.traits.software)


def matmul_seconds(run: Run, rows: float, inner: float, columns: float, *, fp8: bool = False) -> float:
    """Seconds of one matmul, [rows, inner] × [inner, columns]."""
    reached = reached_by(run)
    work = 2 * rows * inner * columns
    # Prologue and epilogue of a tile cost the same whatever the inner dimension.
    half = 256.0 if run.compute_bytes == 4 else reached.inner_half
    short = inner / (inner + half)
    share = reached.matmuls
    if run.compute_bytes == 4 and not run.gpu.is_cpu:
        share = reached.fp32 or FP32_MATMULS * reached.matmuls
    flops = run.peak * share
    if fp8 and run.gpu.fp8:
        flops = run.gpu.fp8 * reached.fp8
    itemsize = 1 if fp8 else run.compute_bytes
    moved = (rows * inner + inner * columns + rows * columns) * itemsize
    return max(work / (flops * short) * _tail(run, rows, inner, columns), moved / bandwidth(run, reached))


def _tail(run: Run, rows: float, inner: float, columns: float) -> float:
    """How much longer a matmul takes because its tiles are not a multiple of the multiprocessors."""
    units = MULTIPROCESSORS.get(run.gpu.name)
    if units is None or run.compute_bytes == 4:
        return 1.0
    waves = rows * columns / TILE / units * max(1.0, inner / SHARED_INNER)
    return max(1.0, min((1 + TAIL / (waves * parts)) / speed for parts, speed in TILES) / (1 + TAIL / WAVES))


def block_compute(run: Run) -> BlockCompute:
    """Seconds of a block, including activation recomputation."""
    matmuls, again = _matmuls(run)
    attention, elementwise = _attention(run), _elementwise(run)
    share = 1.0 / run.recompute if isinstance(run.recompute, int) else 1.0
    if run.recomputed_blocks:
        share = min(share, run.recomputed_blocks * run.mesh.pp / run.shape.layers)
    recomputed = 0.0
    if run.recompute == "selective":
        recomputed = again + elementwise.forward
    elif run.recompute == "parts":
        recomputed = _recomputed_parts(run, attention.forward)
    elif run.recompute == "cheap" and run.compiled:
        # Recomputed inputs are written once more before the matmuls that read them; their sources are read in the
        # backward pass anyway.
        written = 2 * run.shape.hidden + run.shape.ffn / run.mesh.tp
        recomputed = run.tokens * written * run.compute_bytes / bandwidth(run)
    elif run.repeats_forward:
        # All but the last matmul: recomputation stops early once every saved tensor exists, and the backward pass does
        # not need that one's output.
        last = linears(run.shape)[-1]
        skipped = matmul_seconds(run, run.tokens, *last.local_sizes(run.mesh.tp), fp8=run.precision == "fp8")
        recomputed = share * (matmuls.forward - skipped + attention.forward + elementwise.forward)
    return BlockCompute(matmuls, attention, elementwise, recomputed)


def _recomputed_parts(run: Run, attention: float) -> float:
    """Forward seconds of the parts of a block that are recomputed."""
    shape, itemsize, parts = run.shape, run.compute_bytes, run.recomputed_parts
    inner = run.tokens / run.mesh.tp * shape.ffn * itemsize * (3 if shape.traits.gated else 2)
    found = attention if "attention" in parts else 0.0
    if "norm" in parts:
        moved = 2 * run.stream_tokens * shape.hidden * (run.residual_bytes + itemsize)
        found += moved / bandwidth(run)
    if "activation" in parts or "mlp" in parts:
        found += inner / bandwidth(run)
    if "mlp" in parts:
        fp8 = run.precision == "fp8"
        wide = [one for one in linears(shape) if one.reads == "second norm"]
        found += sum(matmul_seconds(run, run.tokens, *one.local_sizes(run.mesh.tp), fp8=fp8) for one in wide)
    return found


def _matmuls(run: Run) -> tuple[Seconds, float]:
    """(the matmuls of a block, the forward seconds that selective checkpointing recomputes)."""
    fp8 = run.precision == "fp8"
    forward = backward = again = 0.0
    matrices = packed_linears(run)
    kept = selected_matmuls(run, matrices)
    for index, one in enumerate(matrices):
        inputs, outputs = one.local_sizes(run.mesh.tp)
        ahead = matmul_seconds(run, run.tokens, inputs, outputs, fp8=fp8)
        forward += ahead
        backward += matmul_seconds(run, run.tokens, outputs, inputs, fp8=fp8)
        if run.trained.blocks:
            backward += run.trained.blocks * matmul_seconds(run, inputs, run.tokens, outputs, fp8=fp8)
        again += 0.0 if index in kept else ahead
        if fp8 and not run.traits.casts_once:
            cast = run.tokens * (inputs + outputs) + inputs * outputs
            forward += cast * CAST_TRAFFIC / bandwidth(run)
            backward += 2 * cast * CAST_TRAFFIC / bandwidth(run)
    if fp8 and run.traits.casts_once:
        read = {one.reads: one.local_sizes(run.mesh.tp)[0] for one in matrices}
        made = sum(one.local_sizes(run.mesh.tp)[1] for one in matrices)
        elements = sum(one.parameters for one in matrices) / run.mesh.tp
        # The second layout is for the weight gradient.
        cast = TWO_LAYOUT_CAST_TRAFFIC if run.trained.blocks else CAST_TRAFFIC
        if run.traits.keeps_fp8_weights:
            elements /= run.grad_accum_steps
        forward += (run.tokens * sum(read.values()) * cast + elements * CAST_TRAFFIC) / bandwidth(run)
        backward += (run.tokens * made * cast + elements * TWO_LAYOUT_CAST_TRAFFIC) / bandwidth(run)
        forward += (len(read) + len(matrices)) * CAST_SECONDS
        backward += len(matrices) * CAST_SECONDS
    if run.adapter is not None:
        ahead, back = _adapters(run, run.adapter)
        forward, backward = forward + ahead, backward + back
        if run.adapter.quantize is not None:
            elements = sum(one.parameters for one in matrices) / run.mesh.tp
            unpacking = elements * (stored_bytes(run, run.adapter) + run.compute_bytes) / bandwidth(run)
            forward, backward = forward + unpacking, backward + unpacking
    return Seconds(forward, backward), again


def _adapters(run: Run, adapter: Adapter) -> tuple[float, float]:
    """Seconds of a block's adapters in the forward and the backward pass."""
    forward = backward = 0.0
    itemsize, fuses = run.compute_bytes, run.compiled and not run.traits.liger_kernels
    for one in adapted(run):
        inputs, outputs = one.local_sizes(run.mesh.tp)
        # `A x`: layers that read one tensor are computed together, so that it and its gradient are moved once.
        shared = sum(1 for other in adapted(run) if other.reads == one.reads) if fuses else 1
        narrow = matmul_seconds(run, run.tokens, inputs, adapter.rank * shared) / shared
        thin = narrow + matmul_seconds(run, run.tokens, adapter.rank, outputs)
        # Added to the frozen layer's output, which is read and written once more; the compiler adds it in the kernel
        # that reads both.
        added = outputs if fuses else 3 * outputs
        if run.traits.peft:
            added += 2 * outputs  # scaled by a kernel of its own
        added_backward = inputs / shared if fuses else 6 * outputs
        if run.traits.peft and adapter.quantize is None and not run.traits.narrow_adapters:
            # The input in fp32 and back, and its gradient.
            added, added_backward = added + 6 * inputs, added_backward + 6 * inputs
        if adapter.dropout:
            # Reads the input, writes it and the mask; backward reads gradient and mask, and adds to the input's. PEFT
            # does so in the dtype of its adapters.
            wide = run.traits.peft and not run.traits.narrow_adapters
            passed = 4.5 if wide else 2.5
            added, added_backward = added + passed * inputs, added_backward + passed * inputs
        forward += thin + run.tokens * added * itemsize / bandwidth(run)
        backward += 2 * thin + run.tokens * added_backward * itemsize / bandwidth(run)
        if adapter.dora:
            ahead, back = _dora(run, adapter, inputs, outputs)
            forward, backward = forward + ahead, backward + back
    return forward, backward


def _dora(run: Run, adapter: Adapter, inputs: float, outputs: float) -> tuple[float, float]:
    """What DoRA adds to an adapted layer: the norms of the rows of `W + B A`, and their scale."""
    elements, itemsize = inputs * outputs, run.compute_bytes
    dequantized = 0.0 if adapter.quantize is None else elements * (stored_bytes(run, adapter) + itemsize)
    if not run.traits.peft:
        # A matmul of the matrix with `A`, and its own norms: it is read once more, or dequantized and read.
        forward = matmul_seconds(run, outputs, inputs, adapter.rank)
        reads = 1 if adapter.quantize is None else 2
        return forward + reads * elements * itemsize / bandwidth(run), 0.0
    # `B A` as a matmul with the identity (written and read), the scaled `B A` (read, written), its sum with `W` (two
    # reads, written) and the norms (read); then three kernels over the output, and their backward ones.
    matrices = 7 * elements + 2 * inputs * inputs
    forward = matmul_seconds(run, inputs, inputs, adapter.rank) + matmul_seconds(run, inputs, adapter.rank, outputs)
    scaled = run.tokens * outputs * itemsize / bandwidth(run)
    forward += (matrices * itemsize + dequantized) / bandwidth(run) + 7 * scaled
    backward = 9 * scaled
    if adapter.dropout:
        # The frozen layer's output is of the input without dropout, so it is computed once more.
        forward += matmul_seconds(run, run.tokens, inputs, outputs)
        backward += matmul_seconds(run, run.tokens, outputs, inputs)
    return forward, backward


def _attention(run: Run) -> Seconds:
    """Seconds of attention, averaged over blocks with a sliding window and without."""
    shape, window = run.shape, run.shape.sliding_window
    # Causal attention computes half of the scores; sliding windows fewer.
    causal = run.length / 2 if shape.traits.causal else float(run.length)
    if not window or window >= run.length:
        return _attention_to(run, causal, run.attention)
    sliding = _attention_to(run, window * (1 - window / (2 * run.length)), run.attention)
    unlimited = "fused" if run.attention in ("window", "tiles", "bands") else run.attention
    full, share = _attention_to(run, causal, unlimited), shape.sliding_share
    return Seconds(
        share * sliding.forward + (1 - share) * full.forward, share * sliding.backward + (1 - share) * full.backward
    )


def _attention_to(run: Run, seen: float, path: Path) -> Seconds:
    """Seconds of attention to `seen` keys per query."""
    shape, reached = run.shape, reached_by(run)
    work = 4 * run.tokens * (seen + reached.half_keys) * shape.query_width / run.mesh.tp
    if path == "scores":
        # Eager kernels write and read the full scores about ten times, a compiled or fused softmax four times.
        scores = run.tokens * run.length * shape.heads / run.mesh.tp
        full = 4 * run.tokens * run.length * shape.query_width / run.mesh.tp
        each = FUSED_SCORES if run.fuses_softmax else EAGER_SCORES
        each += DROPPED_SCORES if run.attention_dropout else 0
        moved = scores * each / (run.gpu.memory_bandwidth * STREAMED)
        ahead = full / (run.peak * reached.matmuls) + moved
        return Seconds(ahead, 2 * ahead)
    long_heads = (128 + HEAD_HALF) / 128 * shape.head_size / (shape.head_size + HEAD_HALF)
    biased = BIASED_ATTENTION if shape.traits.biased_attention else 1.0
    kernel = attention_speed(
        path,
        itemsize=run.compute_bytes,
        dropout=run.attention_dropout,
        capability=run.gpu.compute_capability,
    )
    # In 2023 there was no other, so that its speed is that of attention.
    if run.traits.flash2 and run.traits.software != 2023 and (run.gpu.compute_capability or (0, 0)) >= (9, 0):
        kernel *= FLASH_2
    ahead = work / (run.peak * reached.attention * min(1.0, long_heads) * biased * kernel)
    return Seconds(ahead, ATTENTION_BACKWARD * ahead)


def _elementwise(run: Run) -> Seconds:
    """Norms, activation functions, rotary embeddings, residual adds: memory-bound, so time is bytes / bandwidth."""
    shape, itemsize, tp = run.shape, run.compute_bytes, run.mesh.tp
    # The residual stream may be wider than the compute dtype.
    hidden, inner = shape.hidden * run.residual_bytes / itemsize, shape.ffn / tp
    # Without sequence parallelism every tensor-parallel rank computes the norms and residual adds of all tokens.
    shared = run.stream_tokens / run.tokens
    rotated = (shape.query_width + shape.kv_width) / tp if shape.traits.rotary else 0.0
    gated = shape.traits.gated
    if run.compiled:
        # A residual add fused with the following norm reads both summands, and writes the stream and its norm. Kernels
        # between two matmuls touch each tensor once.
        narrow = hidden if run.traits.liger_kernels else shape.hidden
        per_token = 4 * (hidden + narrow) * shared + 2 * rotated + (3 if gated else 2) * inner
        if run.traits.fused_by_hand:
            # The sums of the residual stream are read once more by the norms, and queries copied.
            per_token += 2 * hidden * shared + 2 * shape.query_width / tp
    else:
        written_out = run.traits.unfused_norms and shape.traits.rms_norm
        norm = (15 if written_out else 2) * hidden * shared
        per_token = 2 * (norm + 3 * hidden * shared) + (8 * rotated) + (5 if gated else 2) * inner
        # Biases are added in the matmul's epilogue; heads are transposed for attention and back.
        per_token += 4 * shape.query_width / tp
    biased = 0.0
    if shape.traits.linear_bias:
        biased = sum(one.local_sizes(tp)[1] for one in linears(shape))
    elif shape.traits.qkv_bias:
        biased = (shape.query_width + 2 * shape.kv_width) / tp
    if run.dropout:
        per_token += 6 * hidden * shared
    ahead = run.tokens * per_token * itemsize / bandwidth(run)
    casting = 0.0
    if run.traits.casts_per_use and run.mixed and run.adapter is None:  # under an adapter, weights are in 16 bits
        casting = sum(one.parameters for one in linears(shape)) / tp * (run.weight_bytes + itemsize) / bandwidth(run)
    summed = BIAS_TRAFFIC * run.tokens * biased * itemsize / bandwidth(run) * run.trained.blocks
    spared = summed_gradients(run) * run.tokens * shape.hidden * itemsize / bandwidth(run)
    return Seconds(ahead + casting, TRAFFIC_BACKWARD * ahead + casting + summed - spared)


def head_seconds(run: Run) -> Seconds:
    """Seconds of logits and loss in the last stage."""
    shape, tp = run.shape, run.mesh.tp
    tokens, columns = run.head_tokens, logit_columns(run)
    slower = 1.0
    if not (run.gpu.is_cpu or is_aligned(run) or is_padded(run)):
        slower = max(1.0, (ODD if shape.vocab % (2 * tp) else EVEN) * relative_rate(run.gpu))
    fp8 = run.fp8_head and run.loss == "chunked"
    ahead = slower * matmul_seconds(run, tokens, shape.hidden, columns, fp8=fp8)
    back = slower * matmul_seconds(run, tokens, columns, shape.hidden, fp8=fp8)
    if fp8:
        ahead += columns * shape.hidden * TWO_LAYOUT_CAST_TRAFFIC / bandwidth(run)
        back += tokens * columns * CAST_TRAFFIC / bandwidth(run)
    trained = run.trained.embedding if shape.tied else run.trained.head
    if trained:
        back += slower * matmul_seconds(run, shape.hidden, tokens, columns)
    if is_padded(run):
        ahead += 2 * columns * shape.hidden * run.compute_bytes / bandwidth(run)  # a padded copy of the weight
    fused = is_fused_loss(run) if run.loss == "plain" else run.loss == "fused" or (run.compiled and tp == 1)
    traffic = FUSED_LOGIT_TRAFFIC if fused else PLAIN_LOGIT_TRAFFIC
    if overwrites_logits(run):
        traffic = KERNEL_LOGIT_TRAFFIC
    moved = tokens * columns * traffic / bandwidth(run)
    if run.loss != "plain" and run.of_answers:
        back += ahead + moved / 2  # the logits and their softmax once more
    elif run.loss == "chunked" and run.traits.chunks == "recomputed":
        back += ahead
    return Seconds(ahead + moved / 2, back + moved / 2)


def optimizer_seconds(run: Run, parameters: float) -> float:
    """Optimizer step over `parameters` on a rank: reads and writes weights, gradients and state; norm and clipping."""
    weight = run.weight_bytes
    optimizer = find_optimizer(run.optimizer)
    state = optimizer.streamed_bytes(weight)
    gradient = run.gradient_bytes or weight
    moved = 2.0 * weight + gradient + 2 * state
    foreach = run.traits.foreach_step and run.optimizer == "adamw"
    if foreach:
        moved = FOREACH_PASSES * weight
    if optimizer.factored:
        moved += FACTORED_PASSES * 4
    if run.clips:
        # The norm reads gradients once; a separate clipping kernel reads and writes them again.
        moved += gradient if run.traits.fused_step else 3 * gradient
    if run.mixed and not run.sharded:
        moved += run.compute_bytes + (0 if run.traits.fused_step else weight)
    streamed = foreach or (run.traits.fused_step and optimizer.streams)
    seconds = parameters * moved / (run.gpu.memory_bandwidth * STREAMED if streamed else bandwidth(run))
    if optimizer.needs_whole_matrices:
        # Five Newton-Schulz iterations of three matmuls of the matrix's shorter side.
        short = min(run.shape.hidden, run.shape.ffn)
        seconds += 5 * 3 * 2 * parameters * short / (run.peak * reached_by(run).matmuls)
    return seconds


def bandwidth(run: Run, reached: Efficiency | None = None) -> float:
    """Bytes per second that elementwise kernels reach."""
    return run.gpu.memory_bandwidth * (reached or reached_by(run)).bandwidth
