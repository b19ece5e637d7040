"""The speed of a device's matmuls, attention and copies: what the forecast has of a device in the catalogue."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from shoal.models.emulate import emulated_dtypes, emulated_matmuls
from shoal.parallel.device import BF16_CAPABILITY

# Rows, inner dimension and columns of matmuls, whose mean is taken: those of published tables; for a CPU as large as
# those of models that one trains there.
SIZES, CPU_SIZES = (8192, 10240), (512, 1024)
# Attention of long sequences, with heads of 128.
LENGTH, HEADS, HEAD_SIZE = 8192, 32, 128
CPU_LENGTH, CPU_HEADS = 1024, 4
# Bytes of the tensor that is copied: far larger than a GPU's cache; on a CPU so large that its pages are made anew,
# which takes most of the time there.
COPIED, CPU_COPIED = 2**30, 2**26
# A device that has just been idle is faster than one that trains, so it is kept busy for a while first. One that does
# nothing but matmuls is slower, because they take all of its power, so that it copies for a quarter of the time of each
# behind it, as in compiled steps of large Llamas, of which matmuls and attention take four fifths. An H200 reaches 678
# TFLOP/s without these copies, 709 to 728 with them, 744 with twice as many; in its steps 722.
WARMUP_SECONDS, MEASURED_SECONDS, LEAST = 0.5, 1.0, 5
PAUSE, PAUSING = 0.25, 2**26
FORWARD_MATMULS, BACKWARD_MATMULS = 2, 5
ADA = (8, 9)


def half_dtype(device: torch.device) -> torch.dtype:
    """The 16-bit dtype that models train in on `device`."""
    has_bf16 = device.type == "cpu" or torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    return torch.bfloat16 if has_bf16 else torch.float16


def has_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= ADA


def matmul_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of large matmuls, the mean over their sizes."""
    return statistics.mean(_matmul(device, dtype, size) for size in (SIZES if device.type == "cuda" else CPU_SIZES))


def _matmul(device: torch.device, dtype: torch.dtype, size: int) -> float:
    # Random values: zeros take less power, and a device computes them faster.
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    with emulated_matmuls(emulated_dtypes(device, dtype)):
        return 2 * size**3 / median_seconds(device, lambda: torch.mm(left, right))


def fp8_matmul_flops(device: torch.device) -> float:
    """The same in fp8, with one scale for each tensor."""
    found = []
    for size in SIZES:
        left, right = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=device)
        multiply = partial(torch._scaled_mm, left, right.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        found.append(2 * size**3 / median_seconds(device, multiply))
    return statistics.mean(found)


def attention_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of causal attention, forward and backward pass together, by the kernel that PyTorch chooses."""
    on_gpu = device.type == "cuda"
    length, heads = (LENGTH, HEADS) if on_gpu else (CPU_LENGTH, CPU_HEADS)
    shape = (1, heads, length, HEAD_SIZE)
    query, key, value = (torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3))
    gradient = torch.randn(shape, device=device).to(dtype)

    def attend() -> None:
        with emulated_matmuls(emulated_dtypes(device, dtype)):
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(out, (query, key, value), gradient)

    # Half of the scores are masked.
    work = (FORWARD_MATMULS + BACKWARD_MATMULS) * 2 * heads * length * length / 2 * HEAD_SIZE
    return work / median_seconds(device, attend)


def copied_bytes_per_second(device: torch.device) -> float:
    """Bytes that an elementwise kernel reads and writes per second."""
    source = torch.randn((COPIED if device.type == "cuda" else CPU_COPIED) // 4, device=device)
    return 2 * source.nbytes / median_seconds(device, lambda: source * 2.0)


def median_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """The median time of `run` on a device that has been busy for a while."""
    on_gpu = device.type == "cuda"
    copied, seconds = torch.zeros(PAUSING if on_gpu else 1, device=device), _seconds_on_gpu if on_gpu else _seconds
    seconds(run, 0, copied)  # the first time, libraries are loaded
    copies = 0
    if on_gpu:
        once = min(seconds(lambda: copied.mul_(1.0), 0, copied) for _ in range(LEAST))
        copies = round(PAUSE * seconds(run, 0, copied) / once)
    found: list[float] = []
    began = time.perf_counter()
    while (passed := time.perf_counter() - began) < WARMUP_SECONDS + MEASURED_SECONDS or len(found) < LEAST:
        taken = seconds(run, copies, copied)
        found = [*found, taken] if passed > WARMUP_SECONDS else [taken]
    return statistics.median(found)


def _seconds(run: Callable[[], object], copies: int, copied: torch.Tensor) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _seconds_on_gpu(run: Callable[[], object], copies: int, copied: torch.Tensor) -> float:
    """Seconds of `run`, behind which the device copies without a break."""
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    first.record()
    run()
    last.record()
    for _ in range(copies):
        copied.mul_(1.0)
    last.synchronize()
    return 1e-3 * float(first.elapsed_time(last))
