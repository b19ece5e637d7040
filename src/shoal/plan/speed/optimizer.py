"""Seconds of an optimizer step on a rank."""

from shoal.catalogue.optimizers import find_optimizer
from shoal.catalogue.shapes import parameters as count_parameters
from shoal.plan.run.run import Run
from shoal.plan.speed.eight_bit import eight_bit_step
from shoal.plan.speed.kernels import bandwidth, eager_bandwidth, streamed_bandwidth
from shoal.plan.speed.muon import orthogonalization_seconds

# Adafactor's update has the size of the gradient and is computed in about this many reads and writes of fp32: its
# square, two means, their outer product, the quotient, its norm, the clipped and scaled update.
FACTORED_PASSES = 14
# LAMB writes its update, reads it and the weights for their norms, and reads both again (multi_tensor_lamb.cu in Apex).
NORMALIZED_PASSES = 5
# The same of torch's foreach AdamW, one kernel for each operation: decay 2, the first moment 3, the second 2 + 3, its
# root 2, divided 2, with epsilon 2, and the update 4 (_multi_tensor_adam in torch/optim/adam.py).
FOREACH_PASSES = 20


def optimizer_seconds(run: Run, parameters: float) -> float:
    """Optimizer step over `parameters` on a rank: reads and writes weights, gradients and state; norm and clipping."""
    weight = run.weight_bytes
    optimizer = find_optimizer(run.optimizer)
    state = optimizer.streamed_bytes(weight)
    gradient = run.gradient_bytes or weight
    moved = 2.0 * weight + gradient + 2 * state
    if run.foreach_step:
        moved = FOREACH_PASSES * weight
    if optimizer.factored:
        moved += FACTORED_PASSES * 4
    if optimizer.normalizes:
        moved += NORMALIZED_PASSES * 4
    if run.clips:
        # The norm reads gradients once; a separate clipping kernel reads and writes them again.
        moved += gradient if run.traits.fused_step else 3 * gradient
    if run.precision == "16-mixed" and run.in_autocast and not run.traits.fused_step:
        # GradScaler divides gradients by the scale (unscale_ in torch/amp/grad_scaler.py).
        moved += 2 * gradient
    if run.mixed and not run.sharded:
        moved += run.compute_bytes + (0 if run.traits.fused_step else weight)
    rate = bandwidth(run)
    if run.foreach_step:
        rate = eager_bandwidth(run, streams=True)
    elif run.traits.fused_step and optimizer.streams:
        rate = streamed_bandwidth(run)
    seconds = max(parameters * moved / rate, eight_bit_step(run, parameters))
    if optimizer.needs_whole_matrices:
        turns = run.replicas if run.traits.shares_muon else 1
        seconds += orthogonalization_seconds(run) * parameters / count_parameters(run.shape) / turns
    return seconds
