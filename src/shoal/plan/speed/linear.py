"""Seconds of the matmuls of one linear layer: one for each, or for each expert of a mixture."""

from shoal.plan.run.blocks import MLP, Linear
from shoal.plan.run.run import Run
from shoal.plan.speed.experts import expert_linear
from shoal.plan.speed.kernels import matmul_seconds


def linear_seconds(run: Run, one: Linear) -> tuple[float, float, float]:
    """(forward pass, gradient of the input, gradient of the weight) of a layer on one rank."""
    if run.shape.experts and one.reads in MLP:
        return expert_linear(run, one)
    fp8 = run.precision == "fp8"
    inputs, outputs = one.local_sizes(run.mesh.tp)
    return (
        matmul_seconds(run, run.tokens, inputs, outputs, fp8=fp8),
        matmul_seconds(run, run.tokens, outputs, inputs, fp8=fp8),
        matmul_seconds(run, inputs, run.tokens, outputs, fp8=fp8),
    )
