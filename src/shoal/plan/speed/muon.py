"""Seconds of Muon's step: the Newton-Schulz iterations of optim/muon.py."""

from shoal.plan.run.blocks import orthogonalized
from shoal.plan.run.run import Run
from shoal.plan.speed.kernels import bandwidth, matmul_seconds

ITERATIONS = 5
# Host time of a batch: 15 matmuls and a dozen other kernels at 15 microseconds. Measured on the host of an H200 with
# one matrix per batch: benchmarks/gpu/muon_h200.
HOST_SECONDS = 0.4e-3
# Bytes that the kernels around the iteration move per element: the update in fp32 written and read 8, in bf16 written
# 2, its norm 2, normalized 4, read by the weights' update 2.
BYTES = 18


def orthogonalization_seconds(run: Run) -> float:
    """Seconds of the iterations over all matrices of blocks: in each, three matmuls of the shorter side. Few and small
    matrices take as long as the host needs to launch their kernels."""
    seconds = 0.0
    for (short, long), count, together in orthogonalized(run.shape):
        rows = together * short
        inner = matmul_seconds(run, rows, long, short) + matmul_seconds(run, rows, short, short)
        matmuls = ITERATIONS * (inner + matmul_seconds(run, rows, short, long))
        around = together * short * long * BYTES / bandwidth(run)
        seconds += count / together * max(matmuls + around, HOST_SECONDS)
    return seconds
