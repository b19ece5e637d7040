"""Seconds of single kernels: a matmul by its shape, and bytes over the memory bandwidth."""

from dataclasses import dataclass

from shoal.catalogue.efficiency import CORRECTING, FP32_MATMULS, GDDR, Efficiency, copied_share, efficiency
from shoal.catalogue.multiprocessors import multiprocessors, relative_rate
from shoal.plan.run.run import Run

# Elements of the output that a multiprocessor computes at a time, 128 × 256, and inner dimensions from which on several
# multiprocessors share a tile. When the last tiles are computed, some multiprocessors wait: as if there were a third of
# a wave of tiles more. The shares of the peak are those of twenty waves and more.
TILE, SHARED_INNER, TAIL, WAVES = 128 * 256, 2048, 0.3, 20
# The narrowest tile of a matmul in fp32.
WIDE_TILE = 64
# Smaller tiles, by how many of them are in a large one, and their speed.
TILES = ((1, 1.0), (2, 0.92), (8, 0.75))
# A smaller tile reads more bytes for its FLOPs, which takes a multiprocessor as long whatever its peak. On Ada, whose
# cache has most of them, small tiles are therefore nearly as fast: squares of 1,024 reach 0.80 to 0.91 of large ones on
# an RTX 4060, 4060 Ti and 4090, but 0.75 to 0.79 on an RTX 3060, 3070 and 3080, 0.61 on a V100 and 0.40 on an RTX 5090
# (zzc0721/torch-performance-test-data, issues 66, 78, 114, 124, 131, 140, 145, 171). With 2,048 tokens of Qwen3-0.6B an
# RTX 4090 reaches 140 TFLOP/s, of 146 (XiaoJianyu219/llm-infra-bench, 08-single-gpu-profiling).
NARROW = ((8, 9),)
# Share of the memory bandwidth that a streaming kernel over long tensors reaches: our AdamW of fp32 weights on an H200
# moves 34.6 GB in 8.6 ms (benchmarks/gpu/ideas_h200/kernels_wide_stream_4.txt); its norm is a little slower.
STREAMED = 0.8
# Bytes per second and multiprocessor of PyTorch's own elementwise kernels. They have as many bytes on their way to a
# multiprocessor whatever its memory, which is enough for an H200 (4.8 TB/s over 132) and not for a B200: pytorch issue
# 161518; CUB doubled them there (NVIDIA/cccl, pull request 4790).
EAGER_RATE = 4.8e12 / 132
# `STREAMED` of GeForce and workstation parts since the RTX 30, whose memory is slow for their multiprocessors: AdamW's
# kernels reach 0.89 to 0.92 on an RTX 4090 (XiaoJianyu219/llm-infra-bench, 08-single-gpu-profiling: ref_s2048_b1).
STREAMED_GDDR = 0.90


@dataclass(frozen=True)
class Seconds:
    """Seconds of one kind of work in the forward and the backward pass."""

    forward: float
    backward: float

    @property
    def both(self) -> float:
        return self.forward + self.backward

    def over(self, blocks: float, passed: float) -> float:
        """Seconds of `blocks`, of which the backward pass goes through the share `passed`."""
        return blocks * (self.forward + passed * self.backward)


def reached_by(run: Run) -> Efficiency:
    """The shares of the device's peaks that this run's software reaches."""
    return efficiency(run.gpu, software=run.traits.software, transformer_engine=run.traits.fused_by_hand)


def matmul_seconds(
    run: Run,
    rows: float,
    inner: float,
    columns: float,
    *,
    fp8: bool = False,
    itemsize: int = 0,
    unaligned: bool = False,
) -> float:
    """Seconds of one matmul, [rows, inner] × [inner, columns]; `itemsize`: 4 if it is in fp32 though others are not;
    `unaligned`: it is, because tensor cores cannot read its rows."""
    reached = reached_by(run)
    work = 2 * rows * inner * columns
    itemsize = itemsize or run.compute_bytes
    flops = matmul_flops(run, itemsize)
    if itemsize == 4 and run.compute_bytes < 4 and not unaligned:
        return _wide_matmul_seconds(run, rows, inner, columns, flops)
    # Prologue and epilogue of a tile cost the same whatever the inner dimension.
    half = 256.0 if unaligned else reached.wide_inner_half if itemsize == 4 else reached.inner_half
    short = inner / (inner + half)
    if fp8 and run.gpu.fp8:
        flops = run.gpu.fp8 * reached.fp8
    size = 1 if fp8 else itemsize
    read, written = (rows * inner + inner * columns) * size, rows * columns * size
    # Where fp32 matmuls are not published, their share of the peak is that of training, with both.
    tail = _tail(run, rows, inner, columns, itemsize) if itemsize < 4 or (reached.fp32 and not unaligned) else 1.0
    return max(work / (flops * short) * tail, read / contiguous_rate(run) + written / bandwidth(run, reached))


def _wide_matmul_seconds(run: Run, rows: float, inner: float, columns: float, flops: float) -> float:
    """Seconds of a matmul in fp32 beside 16-bit ones, such as an adapter's: no tile is narrower than 64, and it is
    written when it is computed. Within a quarter of what an H200 takes with ranks of 8 to 256
    (benchmarks/gpu/adapters_h200/kernels.json)."""
    work = 2 * max(rows, WIDE_TILE) * inner * max(columns, WIDE_TILE)
    written, read = rows * columns * 4, (rows * inner + inner * columns) * 4
    return max(work / flops + written / bandwidth(run), (read + written) / bandwidth(run))


def matmul_flops(run: Run, itemsize: int) -> float:
    """FLOP/s of large matmuls whose elements have `itemsize` bytes."""
    reached = reached_by(run)
    if itemsize < 4:
        return run.peak * reached.matmuls
    return run.gpu.fp32 * (reached.fp32 or FP32_MATMULS * reached.matmuls)


def _tail(run: Run, rows: float, inner: float, columns: float, itemsize: int) -> float:
    """How much longer a matmul takes because its tiles are not a multiple of the multiprocessors."""
    units = multiprocessors(run.gpu)
    if units is None:
        return 1.0
    waves = rows * columns / TILE / units * max(1.0, inner / SHARED_INNER)
    slower = min(1.0, relative_rate(run.gpu)) if itemsize < 4 and run.gpu.compute_capability in NARROW else 1.0
    tiles = ((parts, 1 + slower * (1 / speed - 1)) for parts, speed in TILES)
    return max(1.0, min((1 + TAIL / (waves * parts)) * longer for parts, longer in tiles) / (1 + TAIL / WAVES))


def bandwidth(run: Run, reached: Efficiency | None = None) -> float:
    """Bytes per second that elementwise kernels reach."""
    return run.gpu.memory_bandwidth * (reached or reached_by(run)).bandwidth


def eager_bandwidth(run: Run, *, streams: bool = False) -> float:
    """The same of kernels that are PyTorch's own; `streams`: over long tensors."""
    rate = streamed_bandwidth(run) if streams else bandwidth(run)
    units = multiprocessors(run.gpu)
    return rate * min(1.0, units * EAGER_RATE / run.gpu.memory_bandwidth) if units else rate


def streamed_bandwidth(run: Run) -> float:
    """Bytes per second of a kernel that streams over long tensors."""
    share = STREAMED
    if run.gpu.name in CORRECTING:
        share = copied_share(run.gpu)
    elif run.gpu.compute_capability in GDDR:
        share = STREAMED_GDDR
    return run.gpu.memory_bandwidth * share


def contiguous_rate(run: Run, per_unit: float = EAGER_RATE) -> float:
    """Bytes per second of PyTorch's kernels on contiguous tensors; `per_unit`: of a multiprocessor, if it is less."""
    units = multiprocessors(run.gpu)
    memory = run.gpu.memory_bandwidth * copied_share(run.gpu)
    return min(memory, units * per_unit) if units else memory
