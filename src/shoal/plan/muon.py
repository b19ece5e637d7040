"""Muon's step (optim/muon.py): batches of matrices that the Newton-Schulz iteration orthogonalizes, and their time."""

from collections import Counter
from collections.abc import Iterator

from shoal.catalogue.optimizers import orthogonalized_together
from shoal.plan.blocks import linears
from shoal.plan.kernels import bandwidth, matmul_seconds
from shoal.plan.run import Run

ITERATIONS = 5
# Host time of a batch: 15 matmuls and a dozen other kernels at 15 microseconds. Measured on the host of an H200 with
# one matrix per batch: benchmarks/gpu/muon_h200.
HOST_SECONDS = 0.4e-3
# Bytes that the kernels around the iteration move per element: the update in fp32 written and read 8, in bf16 written
# 2, its norm 2, normalized 4, read by the weights' update 2.
BYTES = 18


def orthogonalized(run: Run) -> Iterator[tuple[tuple[int, int], int, int]]:
    """For each shape of the blocks' matrices: its short and its long side, how many there are, and how many at once."""
    shapes = Counter((one.inputs, one.outputs) for one in linears(run.shape))
    for (inputs, outputs), count in shapes.items():
        short, long = sorted((inputs, outputs))
        count *= run.shape.layers
        yield (short, long), count, min(count, orthogonalized_together(inputs * outputs))


def orthogonalization_seconds(run: Run) -> float:
    """Seconds of the iterations over all matrices of blocks: in each, three matmuls of the shorter side. Few and small
    matrices take as long as the host needs to launch their kernels."""
    seconds = 0.0
    for (short, long), count, together in orthogonalized(run):
        rows = together * short
        inner = matmul_seconds(run, rows, long, short) + matmul_seconds(run, rows, short, short)
        matmuls = ITERATIONS * (inner + matmul_seconds(run, rows, short, long))
        around = together * short * long * BYTES / bandwidth(run)
        seconds += count / together * max(matmuls + around, HOST_SECONDS)
    return seconds
