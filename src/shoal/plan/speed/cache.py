"""Kernels that read what the kernel before them has written from the cache of the device, where it fits there.

Since Ada, parts with GDDR memory have an L2 cache of tens of megabytes, which is several times as fast as their memory.
Where memory is HBM, it is as fast as that.
"""

from shoal.catalogue.gpus import Gpu
from shoal.catalogue.multiprocessors import cycles

# Megabytes of L2, from NVIDIA's architecture papers (Ada, Blackwell) and data sheets; parts with GDDR before
# Ada have 3 to 6.
SIZES: dict[str, int] = {
    "l4": 48,
    "l20": 96,
    "l40": 96,
    "l40s": 96,
    "rtx6000-ada": 96,
    "rtx4060": 24,
    "rtx4060ti-16gb": 32,
    "rtx4070": 36,
    "rtx4070-super": 48,
    "rtx4070ti-super": 48,
    "rtx4080": 64,
    "rtx4090": 72,
    "rtx4090d": 72,
    "rtx5060ti-16gb": 32,
    "rtx5070": 48,
    "rtx5070ti": 48,
    "rtx5080": 64,
    "rtx5090": 96,
    "rtx-pro-6000": 128,
}
# Bytes per clock and multiprocessor of elementwise kernels whose tensors are in the cache: 3.87 TB/s on an RTX 4090
# (mli/transformers-benchmarks, issue 4) and 5.02 on an RTX 5090 (NVIDIA/TileGym, issue 82).
RATE = 12.0
# The hits among the reads of kernels that move more bytes than the cache has: 0.31 with 1.33 times its size and 0.08
# with 2.67 times (the same issue), about its third power.
BEYOND = 3
# Of the bytes of kernels between matmuls, those that go to memory in any case: what autograd saves is written, and read
# in the backward pass. Eager ones of Qwen3-0.6B with 2,048 tokens take an RTX 4090 35 ms a step, where they would take
# 21 from the cache alone and 73 from memory alone (XiaoJianyu219/llm-infra-bench, 08-single-gpu-profiling:
# ref_s2048_b1).
SAVED = 0.27


def cached_seconds(gpu: Gpu, moved: float, memory: float) -> float:
    """Seconds of a kernel that moves `moved` bytes, where `memory` is the rate from memory."""
    return moved / cached_rate(gpu, moved, memory)


def cached_rate(gpu: Gpu, moved: float, memory: float) -> float:
    """Bytes per second of a kernel that moves `moved` bytes, where `memory` is the rate from memory."""
    if gpu.name not in SIZES:
        return memory
    cache = RATE * cycles(gpu)
    if cache <= memory:
        return memory
    hits = (1 - SAVED) * min(1.0, (1e6 * SIZES[gpu.name] / moved) ** BEYOND) if moved else 0.0
    return 1 / (hits / cache + (1 - hits) / memory)
