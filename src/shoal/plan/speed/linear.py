"""Seconds of the matmuls of one linear layer: one for each, or for each expert of a mixture."""

from shoal.plan.run.blocks import MLP, Linear
from shoal.plan.run.run import Run
from shoal.plan.speed.kernels import matmul_seconds

# Rows of every expert that its last tiles compute in vain: on an H200, grouped matmuls with 256 rows per expert reach
# 0.61 of what one matmul of the same inner dimension does, with 1,024 rows 0.84, with 2,048 rows 0.94, if experts get
# unequal numbers of tokens (benchmarks/gpu/grouped_matmuls_h200).
LAST_TILES = 160


def linear_seconds(run: Run, one: Linear) -> tuple[float, float, float]:
    """(forward pass, gradient of the input, gradient of the weight) of a layer on one rank."""
    fp8 = run.precision == "fp8"
    inputs, outputs = one.local_sizes(run.mesh.tp)
    if not run.shape.experts or one.reads not in MLP:
        return (
            matmul_seconds(run, run.tokens, inputs, outputs, fp8=fp8),
            matmul_seconds(run, run.tokens, outputs, inputs, fp8=fp8),
            matmul_seconds(run, inputs, run.tokens, outputs, fp8=fp8),
        )
    # The layer has the width of all experts of a token.
    rows, count, routed = run.tokens * run.shape.routed, run.shape.experts, run.shape.routed
    inputs, outputs = (inputs / routed, outputs) if one.row else (inputs, outputs / routed)
    longer = 1 + LAST_TILES * count / rows
    return (
        longer * matmul_seconds(run, rows, inputs, outputs, fp8=fp8),
        longer * matmul_seconds(run, rows, outputs, inputs, fp8=fp8),
        matmul_seconds(run, inputs * count, rows / count, outputs, fp8=fp8),
    )
