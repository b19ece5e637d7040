"""Compute time of one rank: matmuls by their shapes, attention, and memory-bound elementwise kernels."""

from dataclasses import dataclass

from shoal.catalogue.multiprocessors import relative_rate
from shoal.plan.memory.checkpointed import selected_matmuls
from shoal.plan.memory.head import (
    fused_rows,
    is_aligned,
    is_fused_loss,
    is_padded,
    label_bytes,
    logit_columns,
    overwrites_logits,
)
from shoal.plan.memory.states import quantized_parameters
from shoal.plan.run.blocks import biased_outputs, linears
from shoal.plan.run.run import Run
from shoal.plan.speed import eager
from shoal.plan.speed.adapters import adapter_seconds, dequantization_seconds
from shoal.plan.speed.attention import attention_seconds
from shoal.plan.speed.cache import cached_seconds
from shoal.plan.speed.experts import routed_kernels, runs_one_by_one
from shoal.plan.speed.int8 import int8_kernels
from shoal.plan.speed.kernels import Seconds, bandwidth, eager_bandwidth, matmul_seconds, streamed_bandwidth
from shoal.plan.speed.linear import linear_seconds
from shoal.plan.speed.packed import packed_linears, summed_gradients

# How much longer the three matmuls of a head take if its vocabulary is not aligned: odd as GPT-2's, or even. Measured
# on an H200: benchmarks/gpu/head_h200. Single elements are loaded at the same rate by every multiprocessor, so this is
# less where their peak is lower.
ODD, EVEN = 5.3, 2.5
# Backward kernels read and write about twice what the forward ones do.
TRAFFIC_BACKWARD = 2.0
# The gradient of a bias is a sum over tokens, which reads the gradient of its layer's output once more.
BIAS_TRAFFIC = 1
# Bytes moved per logit by a compiled loss, in two kernels, or by our kernel.
FUSED_LOGIT_TRAFFIC = 10
KERNEL_LOGIT_TRAFFIC = 7
# Tokens of a part of TRL's loss (_CHUNKED_LM_HEAD_CHUNK_SIZE in trl/trainer/sft_trainer.py).
RECOMPUTED_ROWS = 256
# Of a loss that is compiled as one graph with its model, and with the zeros of logits that it returns: on an H200 a
# step of 32,768 tokens takes 2.0 ms more with it than with a sum, and then 1.1 ms (benchmarks/gpu/compiled_loss_h200).
GRAPH_LOGIT_TRAFFIC, RETURNED_LOGIT_TRAFFIC = 8, 10
# Bytes per element that the kernels of a GELU that is written out move, forward and backward, in 16 bits: a power,
# three products with a number, two sums, a tanh, and a product. Under autocast, which computes the power in fp32, also
# casts.
GELU_TRAFFIC, AUTOCAST_GELU_TRAFFIC = (36, 56), (76, 118)
# The same by its definition, x / 2 * (1 + erf(x / sqrt 2)): two products with a number, an erf, a sum, a product;
# backward two products, five kernels of erf's gradient, two products with a number, a sum. Less the passes of a fused
# kernel, which are counted anyway.
ERF_GELU_TRAFFIC = (22 - 4, 48 - 8)
# Reads and writes of the hidden states of each token and expert: gathered 2, weighted 2, summed 3.
ROUTED_PASSES = 7
# Bytes per element of a cast to fp8: reads 16 bits, writes 8; the preceding kernel computes the absolute maximum.
CAST_TRAFFIC = 3
# The same into two layouts, plain and transposed, at once.
TWO_LAYOUT_CAST_TRAFFIC = 4
# Seconds that a tensor cast to fp8 costs whatever its size: three kernels (the last stage of its maximum, its scale,
# the cast) of at least 2.5 microseconds each.
CAST_SECONDS = 7.5e-6


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


def block_compute(run: Run) -> BlockCompute:
    """Seconds of a block, including activation recomputation."""
    matmuls, again = _matmuls(run)
    attention, elementwise = attention_seconds(run), _elementwise(run)
    added = _adapters(run)
    faster = eager.spared_power(run, matmuls.both + attention.both, elementwise.both + added.both)
    ahead, back = matmuls.forward / faster + added.forward, matmuls.backward / faster + added.backward
    matmuls, again = Seconds(ahead, back), again / faster
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
        # All but the last matmul, and its sum with the residual stream: recomputation stops early once every saved
        # tensor exists, and the backward pass needs neither output.
        last = linears(run.shape)[-1]
        skipped = linear_seconds(run, last)[0]
        if not run.shape.traits.post_norm:
            summed = run.shape.hidden * (2 * run.residual_bytes + run.compute_bytes)
            skipped += run.stream_tokens * summed / bandwidth(run)
        if run.traits.reentrant:
            skipped = 0.0
        recomputed = run.repeated_share * (matmuls.forward - skipped + attention.forward + elementwise.forward)
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
        found += sum(linear_seconds(run, one)[0] for one in linears(shape) if one.reads == "second norm")
    return found


def _matmuls(run: Run) -> tuple[Seconds, float]:
    """(the matmuls of a block, the forward seconds that selective checkpointing recomputes)."""
    fp8 = run.precision == "fp8"
    forward = backward = again = 0.0
    matrices = packed_linears(run)
    kept = selected_matmuls(run, matrices)
    for index, one in enumerate(matrices):
        inputs, outputs = one.local_sizes(run.mesh.tp)
        ahead, grad_input, grad_weight = linear_seconds(run, one)
        forward += ahead
        backward += grad_input
        if run.trained.blocks:
            # Of the blocks that the backward pass goes through.
            backward += run.trained.blocks / run.trained.passed * grad_weight
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
    return Seconds(forward, backward), again


def _adapters(run: Run) -> Seconds:
    """The adapters of a block, and what dequantizes its matrices."""
    if run.adapter is None:
        return Seconds(0.0, 0.0)
    forward, backward = adapter_seconds(run, run.adapter)
    if run.in_int8:
        around = int8_kernels(run)
        forward, backward = forward + around.forward, backward + around.backward
    elif run.adapter.quantize is not None:
        elements = quantized_parameters(run) / run.mesh.tp
        ahead, back = dequantization_seconds(run, run.adapter, elements)
        forward, backward = forward + ahead, backward + back
    return Seconds(forward, backward)


def _elementwise(run: Run) -> Seconds:
    """Norms, activation functions, rotary embeddings, residual adds: memory-bound, so time is bytes / bandwidth."""
    found = _compiled_kernels(run) if run.compiled else eager.block_seconds(run)
    shape, itemsize = run.shape, run.compute_bytes
    rate = bandwidth(run) if run.compiled else eager_bandwidth(run)
    per_token, ahead, behind = 0.0, 0.0, 0.0
    if run.compiled and not (run.traits.liger_kernels or runs_one_by_one(run)):
        # Each expert's inputs are gathered, its outputs weighted, and summed.
        per_token = ROUTED_PASSES * shape.routed * shape.hidden
    else:
        ahead, behind = (eager.kernel_seconds(run, kernels, run.tokens) for kernels in routed_kernels(run))
    if run.dropout:
        per_token += 6 * shape.hidden * run.residual_bytes / itemsize * run.stream_tokens / run.tokens
    others, gelu = run.tokens * per_token * itemsize / rate, _written_out_gelu(run)
    forward = found.forward + ahead + others + gelu.forward
    return Seconds(forward, found.backward + behind + TRAFFIC_BACKWARD * others + gelu.backward)


def _compiled_kernels(run: Run) -> Seconds:
    """The elementwise kernels of compiled blocks: one between two matmuls, which touches each tensor once."""
    shape, itemsize, tp = run.shape, run.compute_bytes, run.mesh.tp
    rate = bandwidth(run)
    # The residual stream may be wider than the compute dtype.
    wide = run.layer_bytes / itemsize
    hidden, inner = shape.hidden * run.residual_bytes / itemsize, wide * shape.ffn / tp
    # Without sequence parallelism every tensor-parallel rank computes the norms and residual adds of all tokens.
    shared = run.stream_tokens / run.tokens
    rotated = wide * (shape.query_width + shape.kv_width) / tp if shape.traits.rotary else 0.0
    # A residual add fused with the following norm reads both summands, and writes the stream and its norm.
    narrow = hidden if run.traits.liger_kernels else shape.hidden
    sums = [(2 * hidden + 3 * narrow) * shared] if shape.shared_norm else [2 * (hidden + narrow) * shared] * 2
    moved = [*sums, 2 * rotated, (3 if shape.traits.gated else 2) * inner]
    if run.traits.fused_by_hand:
        # The sums of the residual stream are read once more by the norms, and queries copied.
        moved.append(2 * hidden * shared + 2 * shape.query_width / tp)
    sizes = [run.tokens * itemsize * one for one in moved]
    ahead = sum(cached_seconds(run.gpu, one, rate) for one in sizes)
    behind = sum(cached_seconds(run.gpu, TRAFFIC_BACKWARD * one, rate) for one in sizes)
    casting = 0.0
    if run.casts_weights:
        casting = sum(one.parameters for one in linears(shape)) / tp * (run.weight_bytes + itemsize) / rate
        if run.residual_bytes > itemsize and run.traits.liger_kernels:
            # And every layer the normalized input, which has the dtype of the residual stream.
            read = sum(one.local_sizes(tp)[0] for one in linears(shape) if one.reads in ("norm", "second norm"))
            casting += run.tokens * read * (itemsize + run.residual_bytes) / rate
    if wide > 1:
        # A layer casts its input to the compute dtype, and its output back; attention's output is in that dtype.
        cast = sum(sum(one.local_sizes(tp)) for one in linears(shape) if one.reads != "attention")
        casting += run.tokens * cast * (itemsize + run.layer_bytes) / rate
    summed = BIAS_TRAFFIC * run.tokens * biased_outputs(shape, tp) * itemsize / rate * run.trained.blocks
    spared = summed_gradients(run) * run.tokens * shape.hidden * itemsize / rate
    return Seconds(ahead + casting, behind + casting + summed - spared)


def _written_out_gelu(run: Run) -> Seconds:
    """The kernels of a GELU that is not one."""
    if not (run.writes_out_gelu or run.writes_out_erf):
        return Seconds(0.0, 0.0)
    # Autocast computes a power in fp32, which code that recomputes it writes as products.
    powers = run.in_autocast and not run.shape.traits.recomputed_gelu
    ahead, back = AUTOCAST_GELU_TRAFFIC if powers else GELU_TRAFFIC
    if not run.writes_out_gelu:
        ahead, back = ERF_GELU_TRAFFIC
    rate = eager_bandwidth(run, streams=True) * 2 / run.compute_bytes
    elements = run.tokens * run.shape.ffn / run.mesh.tp
    return Seconds(elements * ahead / rate, elements * back / rate)


def head_seconds(run: Run) -> Seconds:
    """Seconds of logits and loss in the last stage."""
    shape, tp = run.shape, run.mesh.tp
    tokens, columns = run.head_tokens, logit_columns(run)
    # A fused loss reads the weight for every part of the tokens, and adds to its gradient.
    rows = fused_rows(run) if run.loss == "fused" else tokens / run.head_parts
    parts = tokens / rows
    slower = 1.0
    if not (run.gpu.is_cpu or is_aligned(run) or is_padded(run)):
        slower = max(1.0, (ODD if shape.vocab % (2 * tp) else EVEN) * relative_rate(run.gpu))
    fp8 = run.fp8_head and run.loss == "chunked"
    itemsize = run.head_bytes
    ahead = parts * slower * matmul_seconds(run, rows, shape.hidden, columns, fp8=fp8, itemsize=itemsize)
    back = parts * slower * matmul_seconds(run, rows, columns, shape.hidden, fp8=fp8, itemsize=itemsize)
    if fp8:
        ahead += columns * shape.hidden * TWO_LAYOUT_CAST_TRAFFIC / bandwidth(run)
        back += tokens * columns * CAST_TRAFFIC / bandwidth(run)
    trained = run.trained.embedding if shape.tied else run.trained.head
    if trained:
        # Added to part by part, in fp32 if weights are: read and written while the next tile is computed.
        summed = parts * shape.hidden * columns if parts > 1 else 0.0
        moved = summed * 2 * run.weight_bytes / streamed_bandwidth(run)
        back += max(slower * matmul_seconds(run, shape.hidden, tokens, columns), moved)
        if run.traits.sums_head_gradient:  # written, cast, and read once more
            back += summed * (2 * run.compute_bytes + 8) / eager_bandwidth(run)
    if run.loss == "chunked" and run.traits.chunks == "recomputed" and run.traits.casts_per_use and run.mixed:
        # TRL casts the head to fp32, and autocast back, for each part of 256 tokens, in either pass.
        copied = tokens / RECOMPUTED_ROWS * shape.hidden * columns * (4 + run.compute_bytes)
        ahead += copied / streamed_bandwidth(run)
    if parts > 1 and run.casts_weights and run.traits.liger_kernels:
        # Autocast does not keep its copy of a view, nor of a frozen weight, so that every part makes its own.
        copied = parts * shape.hidden * columns * (4 + run.compute_bytes) / streamed_bandwidth(run)
        ahead += copied
        back += 0.0 if trained else copied
    if is_padded(run):
        ahead += 2 * columns * shape.hidden * run.compute_bytes / bandwidth(run)  # a padded copy of the weight
    fused = is_fused_loss(run) if run.loss == "plain" else run.loss == "fused" or (run.compiled and tp == 1)
    if fused or overwrites_logits(run):
        in_place = overwrites_logits(run) or run.traits.loss_in_place
        traffic: float = KERNEL_LOGIT_TRAFFIC if in_place else FUSED_LOGIT_TRAFFIC
        if run.loss == "plain" and run.traits.compiles_loss:
            traffic = RETURNED_LOGIT_TRAFFIC if run.traits.returns_logits else GRAPH_LOGIT_TRAFFIC
        if run.loss == "plain":
            traffic += 2 * label_bytes(run)  # written and read
        moved = tokens * columns * traffic / bandwidth(run)
    else:
        moved = eager.loss_seconds(run, tokens * columns)
    if run.loss != "plain" and run.of_answers:
        back += ahead + moved / 2  # the logits and their softmax once more
    elif run.loss == "chunked" and run.traits.chunks == "recomputed":
        back += ahead
    return Seconds(ahead + moved / 2, back + moved / 2)
