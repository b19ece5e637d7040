"""What PyTorch's caching allocator reserves beyond the peak of what is allocated, where segments do not expand: the
tensors of two steps are replayed on a model of it.

Blocks of memory cannot move, so that the order of a step matters. Gradients are allocated between activations, and do
not fit the blocks that these leave. The optimizer's state is allocated at the end of the first step, in the blocks in
which logits and activations were: those of the second step need new ones. What FSDP allocates on streams of its own is
counted elsewhere.
"""

import math
from collections.abc import Sequence
from functools import lru_cache

from shoal.plan.memory.replay import Steps
from shoal.plan.memory.replayed_states import state_widths
from shoal.plan.memory.segments import Allocator, left_beside
from shoal.plan.run.blocks import MLP, linears
from shoal.plan.run.run import Run

# The second step leaves other blocks than the first where a buffer has the gradients: the logits' do not fit these.
STEPS, BUFFERED_STEPS = 2, 3


def is_replayed(run: Run) -> bool:
    """Whether the steps of this run can be replayed: a rank has all blocks, and its tensors are not flattened. Tensor
    parallelism is Megatron's."""
    traits = run.traits
    return (
        not (traits.expandable_segments or traits.planned_memory)
        and (not traits.masters_with_optimizer or run.buffers_gradients)
        and run.mesh.pp == 1
        and (run.mesh.tp == 1 or run.has_engine)
        and not run.gpu.is_cpu
        and (run.recompute in ("none", "cheap") or run.repeats_forward)
    )


@lru_cache(maxsize=4096)
def fragmented(run: Run, limit: float = math.inf) -> float:
    """Bytes that are reserved beyond the peak of what is allocated, on a device with `limit` bytes."""
    memory = replay(run, [run.length] * (BUFFERED_STEPS if run.buffers_gradients else STEPS), limit)
    return memory.reserved - memory.peak + _beside_experts(run)


def _beside_experts(run: Run) -> float:
    """What the matrices of experts leave of their segments, where each is a tensor of its own: with their gradients and
    state they are many of the same size, and the replay has only those that a token is routed to."""
    shape, quantized = run.shape, run.adapter is not None and run.adapter.quantize is not None
    if not shape.experts or run.traits.experts != "modules" or run.sharded or quantized:
        return 0.0
    sizes = [one.parameters / shape.routed for one in linears(shape) if one.reads in MLP]

    def left(width: float) -> float:
        return shape.layers * shape.experts * sum(left_beside(size * width) for size in sizes)

    if run.adapter is not None:
        return left(run.frozen_bytes)
    found = left(run.weight_bytes)
    if run.trained.blocks:
        found += left(run.gradient_bytes or run.trained_bytes)
        found += sum(left(width) for width in state_widths(run)) / run.optimizer_shards
    return found


def replay(run: Run, lengths: Sequence[int], limit: float = math.inf) -> Allocator:
    """The allocator after steps with sequences of these lengths."""
    steps = Steps(run, limit)
    for length in lengths:
        steps.change_length(length)
        steps.step()
    return steps.memory
