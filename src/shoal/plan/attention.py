"""Seconds of attention, by the kernel that computes it."""

from shoal.catalogue.attention import Path, attention_speed
from shoal.catalogue.efficiency import efficiency
from shoal.plan.kernels import STREAMED, Seconds, matmul_flops, matmul_seconds, reached_by
from shoal.plan.run import Run

# Attention kernels reach more of the peak with larger head dimensions; this one reaches half.
HEAD_HALF = 16
# The backward pass of flash attention recomputes the scores: five matmuls where the forward pass has two. It reaches
# less of the peak than the forward pass, and takes 2.75 times as long: cuDNN's and flash attention 2 on an H200, 2.7 to
# 2.9 (benchmarks/gpu/attention_h200). The shares of the peak are of both passes.
BACKWARD_MATMULS, BACKWARD_SECONDS = 2.5, 2.75
# Attention kernels with ALiBi reach about half of flash attention's speed.
BIASED_ATTENTION = 0.52
# Flash attention 2 on Hopper, relative to cuDNN's kernels: benchmarks/gpu/attention_h200.
FLASH_2 = 0.6
# The same on data center Blackwell, relative to flash attention 4. It uses the instructions of Ampere, which are no
# faster there than on Hopper: 352 to 362 TFLOP/s forward from 2,048 tokens on (meta-pytorch/tritonbench, pull request
# 171), so 333 of both passes, where flash attention 4 reaches 1,150. Half of it at as many keys as on Hopper.
FLASH_2_BLACKWELL, FLASH_2_HALF_KEYS = 0.29, 200
# Attention in fp32, which has neither flash attention nor tensor cores, relative to matmuls in fp32: on an H200, where
# it reaches 0.59 of the peak (benchmarks/gpu/attention_h200).
FP32_ATTENTION = 0.72
# Libraries of 2022 and before computed batched matmuls without tensor cores if the rows of a head are not aligned: with
# heads of 108 instead of 144 elements, BigScience's 182B model took 163 s per step instead of 125, which leaves the
# matmuls of attention about 10 TFLOP/s, half of an A100's fp32 peak (train/tr11-176B-ml/chronicles-prequel.md).
HEAD_ALIGNMENT, ANY_ALIGNMENT = 16, 2023


def attention_seconds(run: Run) -> Seconds:
    """Seconds of attention, averaged over blocks with a sliding window and without."""
    shape, window = run.shape, run.shape.sliding_window
    # Causal attention computes half of the scores; sliding windows fewer.
    length = run.document_length or run.length
    causal = length / 2 if shape.traits.causal else float(length)
    if not window or window >= length:
        return _attention_to(run, causal, run.attention)
    sliding = _attention_to(run, window * (1 - window / (2 * length)), run.attention)
    unlimited = "fused" if run.attention in ("window", "tiles", "bands") else run.attention
    full, share = _attention_to(run, causal, unlimited), shape.sliding_share
    return Seconds(
        share * sliding.forward + (1 - share) * full.forward, share * sliding.backward + (1 - share) * full.backward
    )


def _attention_to(run: Run, seen: float, path: Path) -> Seconds:
    """Seconds of attention to `seen` keys per query."""
    shape, reached, itemsize = run.shape, reached_by(run), run.attention_bytes
    flash2 = _flash2(run)
    half_keys = min(reached.half_keys, FLASH_2_HALF_KEYS) if flash2 < 1 else reached.half_keys
    work = 4 * run.tokens * (seen + half_keys) * shape.query_width / run.mesh.tp
    if path == "scores":
        return _materialized(run)
    long_heads = (128 + HEAD_HALF) / 128 * shape.head_size / (shape.head_size + HEAD_HALF)
    biased = BIASED_ATTENTION if shape.traits.biased_attention else 1.0
    kernel = attention_speed(
        path,
        dropout=run.attention_dropout,
        capability=run.gpu.compute_capability,
    )
    # Flash attention 2, of 2023, did not become faster with later libraries.
    share = efficiency(run.gpu).attention * flash2 if flash2 < 1 else reached.attention
    flops = run.peak * share if itemsize < 4 else matmul_flops(run, itemsize) * FP32_ATTENTION
    both = (1 + BACKWARD_MATMULS) * work / (flops * min(1.0, long_heads) * biased * kernel)
    ahead = both / (1 + BACKWARD_SECONDS)
    return Seconds(ahead, both - ahead)


def _flash2(run: Run) -> float:
    """The speed of flash attention 2 relative to the device's best kernels, if the system uses it; else 1."""
    family = (run.gpu.compute_capability or (0, 0))[0]
    # On Hopper there was no other in 2023, so that its speed is that of attention. Elsewhere there still is none.
    if not run.traits.flash2 or family not in (9, 10) or (family == 9 and run.traits.software == 2023):
        return 1.0
    return FLASH_2 if family == 9 else FLASH_2_BLACKWELL


def _materialized(run: Run) -> Seconds:
    """Seconds of attention that writes and reads the score of every pair of tokens, kernel by kernel."""
    queries, keys, width = run.tokens * run.shape.heads / run.mesh.tp, run.length, run.shape.head_size
    # Forward: scores from queries and keys, output from probabilities and values. Backward: the gradients of
    # probabilities, values, queries and keys.
    unaligned = width * run.attention_bytes % HEAD_ALIGNMENT > 0 and 0 < run.traits.software < ANY_ALIGNMENT
    itemsize = 4 if unaligned else run.attention_bytes
    made = matmul_seconds(run, queries, width, keys, itemsize=itemsize, unaligned=unaligned)
    read = matmul_seconds(run, queries, keys, width, itemsize=itemsize, unaligned=unaligned)
    each = queries * keys / (run.gpu.memory_bandwidth * STREAMED)
    ahead, back = score_traffic(run)
    return Seconds(made + read + each * ahead, made + 3 * read + each * back)


def score_traffic(run: Run) -> tuple[float, float]:
    """Bytes that the kernels between the two matmuls move per score, forward and backward."""
    itemsize = run.attention_bytes
    dropped = 4 if run.autocasts_softmax and not run.fuses_softmax else itemsize
    dropout = 2 * dropped + 1 if run.attention_dropout else 0
    if run.fuses_softmax:
        # Scale, mask and softmax are one kernel, whose backward pass reads the probabilities and their gradient.
        return 2 * itemsize + dropout, 3 * itemsize + dropout
    scaled, masked = 2 * itemsize, 2 * itemsize * (2 if run.clamps_scores else 1)
    if run.upcasts_softmax:
        # Softmax reads fp16 and writes fp32, which is cast back. It does not read bf16, of which there is a copy in
        # fp32 first, and of its gradient too (softmax in aten/src/ATen/native/SoftMax.cpp).
        softmax, backward, casts = itemsize + 4, itemsize + 8, itemsize + 4
        if not run.is_half:
            softmax, backward = softmax + 8, backward + 8
    elif run.autocasts_softmax:
        softmax, backward, casts = 8, 12, 2 * (itemsize + 4)
    else:
        softmax, backward, casts = 2 * itemsize, 3 * itemsize, 0
    # PyTorch multiplies gradient and output before the kernel of the backward pass (softmax_backward_cuda_out in
    # aten/src/ATen/native/cuda/SoftMax.cu).
    backward += 3 * (4 if run.upcasts_softmax or run.autocasts_softmax else itemsize)
    return scaled + masked + softmax + casts + dropout, scaled + backward + casts + dropout
