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
from shoal.plan.memory.segments import Allocator
from shoal.plan.run.run import Run

STEPS = 2


def is_replayed(run: Run) -> bool:
    """Whether the steps of this run can be replayed: a rank has all blocks, and its tensors are not flattened."""
    traits = run.traits
    return (
        not (traits.expandable_segments or traits.planned_memory or traits.masters_with_optimizer)
        and run.mesh.tp == run.mesh.pp == 1
        and not run.gpu.is_cpu
        and (run.recompute in ("none", "cheap") or run.repeats_forward)
    )


@lru_cache(maxsize=4096)
def fragmented(run: Run, limit: float = math.inf) -> float:
    """Bytes that are reserved beyond the peak of what is allocated, on a device with `limit` bytes."""
    memory = replay(run, [run.length] * STEPS, limit)
    return float(memory.reserved - memory.peak)


def replay(run: Run, lengths: Sequence[int], limit: float = math.inf) -> Allocator:
    """The allocator after steps with sequences of these lengths."""
    steps = Steps(run, limit)
    for length in lengths:
        steps.change_length(length)
        steps.step()
    return steps.memory
