"""Seconds of the matmuls of one linear layer: one for each, or for each expert of a mixture."""

from shoal.plan.run.blocks import MLP, Linear
from shoal.plan.run.run import Run
from shoal.plan.speed.experts import expert_linear
from shoal.plan.speed.int8 import multiplies_dequantized
from shoal.plan.speed.kernels import matmul_seconds


def linear_seconds(run: Run, one: Linear) -> tuple[float, float, float]:
    """(forward pass, gradient of the input, gradient of the weight) of a layer on one rank."""
    if run.shape.experts and one.reads in MLP:
        return expert_linear(run, one)
    fp8 = run.precision == "fp8"
    inputs, outputs = one.local_sizes(run.mesh.tp)
    # An 8-bit layer's gradient is in the dtype of its input. Its own matmul takes an H200 as long as one in 16 bits
    # (benchmarks/gpu/trainer_h200/kernels.jsonl).
    behind = run.read_bytes(one.reads) if run.in_int8 else 0
    ahead = behind if multiplies_dequantized(run) and not run.autocasts else 0
    return (
        matmul_seconds(run, run.tokens, inputs, outputs, fp8=fp8, itemsize=ahead),
        matmul_seconds(run, run.tokens, outputs, inputs, fp8=fp8, itemsize=behind),
        matmul_seconds(run, inputs, run.tokens, outputs, fp8=fp8),
    )
