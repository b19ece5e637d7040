"""Seconds of attention, by the kernel that computes it."""

from shoal.catalogue.attention import Path, attention_speed
from shoal.catalogue.efficiency import GDDR, efficiency
from shoal.plan.run.run import Run
from shoal.plan.speed.eager import Kernel, kernel_seconds
from shoal.plan.speed.kernels import Seconds, matmul_flops, matmul_seconds, reached_by

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
# The same with heads of more than 64 elements on multiprocessors with 100 KB of shared memory, which hold few of its
# tiles: 14.5 of 46.8 TFLOP/s on an RTX 4090 (XiaoJianyu219/llm-infra-bench, 08-single-gpu-profiling:
# prof_fp32_s2048_b1).
FP32_ATTENTION_SMALL = 0.31
# Libraries of 2022 and before computed batched matmuls without tensor cores if the rows of a head are not aligned: with
# heads of 108 instead of 144 elements, BigScience's 182B model took 163 s per step instead of 125, which leaves the
# matmuls of attention about 10 TFLOP/s, half of an A100's fp32 peak (train/tr11-176B-ml/chronicles-prequel.md).
HEAD_ALIGNMENT, ANY_ALIGNMENT = 16, 2023
# What kernels on scores take beside their bytes, in bytes: the random numbers of dropout; the least of a softmax; and
# its rows from which on it takes 1.5 times as long (benchmarks/gpu/scores_h200/kernels.json).
DRAWN, SOFTMAX_LEAST, LONG, LONG_ROWS = 2, 7, 2048, 1.5
# Inner dimension and columns with which a matmul of heads in fp32 takes twice as long as a large one: the same file.
FP32_INNER, FP32_COLUMNS = 48, 19


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
    flash2 = flash2_speed(run, path)
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
    small = run.gpu.compute_capability in GDDR and shape.head_size > 64
    wide = FP32_ATTENTION_SMALL if small else FP32_ATTENTION
    # Flash attention 2, of 2023, did not become faster with later libraries.
    share = efficiency(run.gpu).attention * flash2 if flash2 < 1 else reached.attention
    flops = run.peak * share if itemsize < 4 else matmul_flops(run, itemsize) * wide
    both = (1 + BACKWARD_MATMULS) * work / (flops * min(1.0, long_heads) * biased * kernel)
    ahead = both / (1 + BACKWARD_SECONDS)
    return Seconds(ahead, both - ahead)


def flash2_speed(run: Run, path: Path = "fused") -> float:
    """The speed of flash attention 2 relative to the device's best kernels, if the system uses it; else 1."""
    family = (run.gpu.compute_capability or (0, 0))[0]
    gathered = run.mesh.cp > 1 and run.cp_method == "gather" and run.traits.gathers_keys and path == "fused"
    flash2 = run.traits.flash2 or gathered
    # On Hopper there was no other in 2023, so that its speed is that of attention. Elsewhere there still is none.
    if not flash2 or family not in (9, 10) or (family == 9 and 0 < run.traits.software <= 2023):
        return 1.0
    return FLASH_2 if family == 9 else FLASH_2_BLACKWELL


def _materialized(run: Run) -> Seconds:
    """Seconds of attention that writes and reads the score of every pair of tokens, kernel by kernel."""
    queries, keys, width = run.tokens * run.shape.heads / run.mesh.tp, run.length, run.shape.head_size
    # Forward: scores from queries and keys, output from probabilities and values. Backward: the gradients of
    # probabilities, values, queries and keys.
    unaligned = width * run.attention_bytes % HEAD_ALIGNMENT > 0 and 0 < run.traits.software < ANY_ALIGNMENT
    itemsize = 4 if unaligned else run.attention_bytes
    if run.attention_bytes == 4:
        made, read = _fp32_matmul(run, queries, width, keys), _fp32_matmul(run, queries, keys, width)
    else:
        made = matmul_seconds(run, queries, width, keys, itemsize=itemsize, unaligned=unaligned)
        read = matmul_seconds(run, queries, keys, width, itemsize=itemsize, unaligned=unaligned)
    ahead, back = score_kernels(run)
    return Seconds(
        made + read + kernel_seconds(run, ahead, queries * keys),
        made + 3 * read + kernel_seconds(run, back, queries * keys),
    )


def _fp32_matmul(run: Run, rows: float, inner: float, columns: float) -> float:
    """A matmul of every head in fp32, without tensor cores."""
    short = (1 + FP32_INNER / inner) * (1 + FP32_COLUMNS / columns)
    return 2 * rows * inner * columns / matmul_flops(run, 4) * short


def score_kernels(run: Run) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels between the two matmuls, by the bytes that they move per score, forward and backward. Each is within
    a sixth of what it takes an H200 (benchmarks/gpu/scores_h200/kernels.json)."""
    itemsize = run.attention_bytes
    dropped = 4 if run.autocasts_softmax and not run.fuses_softmax else itemsize
    dropout = [Kernel(1, 2 * dropped + 1 + DRAWN)] if run.attention_dropout else []
    restored = [Kernel(1, 2 * dropped + 1)] if run.attention_dropout else []
    if run.fuses_softmax:
        # Scale, mask and softmax are one kernel, whose backward pass reads the probabilities and their gradient.
        return [Kernel(1, 2 * itemsize), *dropout], [Kernel(1, 3 * itemsize), *restored]
    scaled = Kernel(1, 2 * itemsize)
    masked = [Kernel(1, 2 * itemsize, unrolled=True)]  # the mask is broadcast over heads
    if run.clamps_scores:
        masked.append(Kernel(1, 2 * itemsize))
    widened, narrowed = Kernel(1, itemsize + 4, unrolled=True), Kernel(1, itemsize + 4)
    wide = 4 if run.upcasts_softmax or run.autocasts_softmax else itemsize
    # PyTorch multiplies gradient and output before the kernel of the backward pass (softmax_backward_cuda_out in
    # aten/src/ATen/native/cuda/SoftMax.cu).
    softmax, product = [_softmax(run, 2 * wide)], [Kernel(1, 3 * wide)]
    backward = [Kernel(1, 3 * wide)]
    if run.upcasts_softmax and run.is_half:
        # Softmax reads fp16 and writes fp32. It does not read bf16, of which there is a copy in fp32 first, and of its
        # gradient too (softmax in aten/src/ATen/native/SoftMax.cpp).
        softmax, backward = [_softmax(run, itemsize + 4)], [Kernel(1, itemsize + 8)]
    elif wide > itemsize:
        softmax, backward = [widened, *softmax], [*backward, narrowed]
    # Probabilities in fp32 are cast to what the matmul reads.
    casts, restores = ([narrowed], [widened]) if wide > itemsize else ([], [])
    return (
        [scaled, *masked, *softmax, *casts, *dropout],
        [*restored, *restores, *product, *backward, scaled],
    )


def _softmax(run: Run, moved: float) -> Kernel:
    """A softmax over the keys: in 16 bits its exponentials take longer than its bytes, and rows that are too long for
    registers are read twice."""
    return Kernel(1, max(moved, SOFTMAX_LEAST) * (LONG_ROWS if run.length > LONG else 1.0))
