"""Seconds of attention, by the kernel that computes it."""

from shoal.catalogue.attention import Path, attention_speed
from shoal.plan.kernels import STREAMED, Seconds, matmul_flops, reached_by
from shoal.plan.run import Run

# Attention kernels reach more of the peak with larger head dimensions; this one reaches half.
HEAD_HALF = 16
# The backward pass of flash attention recomputes the scores: five matmuls where the forward pass has two.
ATTENTION_BACKWARD = 2.5
# Attention kernels with ALiBi reach about half of flash attention's speed.
BIASED_ATTENTION = 0.52
# Flash attention 2 on Hopper, relative to cuDNN's kernels: benchmarks/gpu/attention_h200.
FLASH_2 = 0.6
# Attention in fp32, which has neither flash attention nor tensor cores, relative to matmuls in fp32: on an H200, where
# it reaches 0.59 of the peak (benchmarks/gpu/attention_h200).
FP32_ATTENTION = 0.72
# Bytes moved per score that is materialized: by eager kernels, with a softmax in fp32; by a fused or compiled one; and
# by dropout, with its mask.
EAGER_SCORES, FUSED_SCORES, DROPPED_SCORES = 26, 8, 5
# The same in fp32: written by the matmul, scaled, masked, normalized, and read by the second matmul; nothing is cast.
FP32_SCORES = 32


def attention_seconds(run: Run) -> Seconds:
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
    shape, reached, itemsize = run.shape, reached_by(run), run.attention_bytes
    work = 4 * run.tokens * (seen + reached.half_keys) * shape.query_width / run.mesh.tp
    if path == "scores":
        # Eager kernels write and read the full scores about ten times, a compiled or fused softmax four times.
        scores = run.tokens * run.length * shape.heads / run.mesh.tp
        full = 4 * run.tokens * run.length * shape.query_width / run.mesh.tp
        each = FUSED_SCORES if run.fuses_softmax else EAGER_SCORES if itemsize < 4 else FP32_SCORES
        each += DROPPED_SCORES if run.attention_dropout else 0
        moved = scores * each / (run.gpu.memory_bandwidth * STREAMED)
        ahead = full / matmul_flops(run, itemsize) + moved
        return Seconds(ahead, 2 * ahead)
    long_heads = (128 + HEAD_HALF) / 128 * shape.head_size / (shape.head_size + HEAD_HALF)
    biased = BIASED_ATTENTION if shape.traits.biased_attention else 1.0
    kernel = attention_speed(
        path,
        dropout=run.attention_dropout,
        capability=run.gpu.compute_capability,
    )
    # In 2023 there was no other, so that its speed is that of attention.
    if run.traits.flash2 and run.traits.software != 2023 and (run.gpu.compute_capability or (0, 0)) >= (9, 0):
        kernel *= FLASH_2
    flops = run.peak * reached.attention if itemsize < 4 else matmul_flops(run, itemsize) * FP32_ATTENTION
    ahead = work / (flops * min(1.0, long_heads) * biased * kernel)
    return Seconds(ahead, ATTENTION_BACKWARD * ahead)
