"""Weights that are unsharded, or dequantized, at the moments of a step."""

from shoal.plan.memory.states import block_bytes, dequantized_bytes
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import Counts
from shoal.plan.run.run import Run

# Elements that DeepSpeed's ZeRO-3 may hold unsharded, and within which it keeps what is used again
# (stage3_max_live_parameters and stage3_max_reuse_distance), by default: at the end of the forward pass, the last ones.
ZERO_LIVE = 1e9


def live_parameters(run: Run, counts: Counts) -> float:
    """Unsharded weights that ZeRO-3 holds between forward and backward pass."""
    if not (run.traits.hooks_modules and run.gathers_weights):
        return 0.0
    return min(counts.all * run.compute_bytes, ZERO_LIVE * run.compute_bytes)


def gathered_embedding_and_head(run: Run, counts: Counts) -> float:
    """Unsharded weights of both, where weights are gathered."""
    if not run.gathers_weights:
        return 0.0
    return counts.embedding_and_head * run.compute_bytes


def gathered_around(run: Run, counts: Counts) -> float:
    """Unsharded weights of embedding and head during the backward pass: both, the embedding, or none."""
    embedding_and_head = gathered_embedding_and_head(run, counts)
    if not run.separate_head_unit:
        return embedding_and_head
    if not run.keeps_weights:
        return 0.0
    # The head is resharded after the backward pass of the last micro-batch; in a pipeline at the end of the step.
    return (
        min(embedding_and_head, counts.embedding * run.compute_bytes)
        if run.grad_accum_steps == 1 and run.mesh.pp == 1
        else embedding_and_head
    )


def gathered_for_loss(run: Run, counts: Counts, matrix: float) -> float:
    """At the end of the forward pass, besides unsharded blocks: embedding and head, or the head (`matrix`) alone; and
    the all-gather output buffer of the last unit, the head or a block."""
    if not run.gathers_weights:
        return 0.0
    if run.separate_head_unit:
        head = matrix * run.compute_bytes
        return head + (gathered_embedding_and_head(run, counts) if run.keeps_weights else head)
    last = 0.0 if run.keeps_weights else counts.block * run.compute_bytes
    return max(live_parameters(run, counts), gathered_embedding_and_head(run, counts) + last)


def gathered_blocks(run: Run, counts: Counts, *, forward: bool = False) -> float:
    """Weights of blocks that are unsharded at a time: the current and the prefetched ones, or all of them."""
    # A quantized matrix is dequantized while it is used. Of GPTQ's layers the matmul is PyTorch's, which saves the
    # matrix for the backward pass of the block.
    dequantized = 0.0
    if run.adapter is not None and run.adapter.quantize is not None:
        matrices = [one.parameters for one in linears(run.shape)]
        used = sum(matrices) if run.adapter.quantize == "gptq" else max(matrices)
        dequantized = used / run.mesh.tp * dequantized_bytes(run, forward=forward)
    if not run.gathers_weights:
        return dequantized
    itemsize = block_bytes(run)
    if run.keeps_weights:
        return counts.blocks * itemsize + dequantized
    ahead = 1 + max(1, run.prefetch)
    return min(counts.blocks, ahead * counts.block) * itemsize + dequantized


def gathered_in_forward(run: Run, counts: Counts) -> float:
    """The same in the forward pass. There FSDP2 also keeps the all-gather output from which it has copied the current
    block's weights, until it copies those of the next."""
    gathered = gathered_blocks(run, counts, forward=True)
    if not gathered or not run.sharded:
        return gathered
    itemsize = block_bytes(run)
    return min(gathered + counts.block * itemsize, 2 * counts.blocks * itemsize)
