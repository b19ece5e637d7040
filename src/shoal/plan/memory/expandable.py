"""What PyTorch's caching allocator reserves beyond the peak of what is allocated, where segments expand: blocks of
memory cannot move, so that a tensor of another size leaves a part of the block of one that was freed.

How much that is was read from the order in which runs map memory (benchmarks/gpu/memory_maps_h200).
"""

from shoal.plan.memory.activations import needed
from shoal.plan.memory.head import is_fused_loss
from shoal.plan.memory.moments import Moment, recomputation
from shoal.plan.run.layout import Rank
from shoal.plan.run.run import Run

# Recomputed blocks do not fit the gaps that other tensors have left: of what they need for a time, this share is
# reserved in addition.
RECOMPUTED_SLACK = 0.3
# Blocks of the MLP's width that the adapters of a block leave, one or two. Of the blocks that the last ones leave, two
# remain at the loss, whose logits are larger.
LEFT_BY_ADAPTERS, LEFT_AT_LOSS = 1.5, 2


def gaps_between_blocks(run: Run, rank: Rank, found: tuple[Moment, ...]) -> float:
    """Bytes that nothing fits, at the moment that needs most with them, beyond the peak of what is allocated."""
    # Offloaded block inputs do not lie between recomputed blocks.
    recomputed = RECOMPUTED_SLACK * recomputation(run, rank) * (0.5 if run.offloads_inputs else 1.0)
    inner = run.tokens * run.shape.ffn / run.mesh.tp * run.compute_bytes if _frees_outputs(run) else 0.0
    # Tensors of the residual stream's size are placed there in later blocks, and leave the remainder.
    remainders = LEFT_BY_ADAPTERS * rank.blocks * (inner % (run.tokens * run.shape.hidden * run.compute_bytes))
    left = {
        "forward pass": remainders,
        "loss": remainders + LEFT_AT_LOSS * inner + left_by_logits(run),
        "start of the backward pass": remainders,
    }
    highest = max(moment.tree.amount for moment in found)
    return max(recomputed, *(moment.tree.amount + left.get(moment.name, 0.0) - highest for moment in found))


def left_by_logits(run: Run) -> float:
    """A plain loss casts the logits to fp32 and frees them: none of the tensors that follow is as small."""
    if run.loss != "plain" or is_fused_loss(run) or run.head_bytes >= 4 or run.traits.narrow_loss:
        return 0.0
    return run.head_tokens * run.shape.vocab / run.mesh.tp * run.head_bytes


def _frees_outputs(run: Run) -> bool:
    """Whether blocks free what the frozen layers of an MLP return when the adapters' output has been added. DoRA saves
    it."""
    adapter = run.adapter
    if adapter is None or adapter.dora or run.traits.peft or not run.compiled or "inner" not in needed(run):
        return False
    return run.shape.traits.gated and not run.repeats_forward and not run.offloads_activations
