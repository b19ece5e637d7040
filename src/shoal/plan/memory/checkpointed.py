"""What a block saves with activation checkpointing of some of its operations."""

from shoal.plan.memory.activations import block_input, block_kept
from shoal.plan.memory.states import adapted
from shoal.plan.run.blocks import Linear, linears
from shoal.plan.run.run import Run
from shoal.plan.terms import Term, group, leaf


def block_without_parts(run: Run) -> Term:
    """What a block saves if `recomputed_parts` are recomputed: each from its inputs, which stay saved.

    Attention: not the scores, nor the sums of the softmax that a fused kernel saves; its output is the input of the
    next matmul. Norm: not its output, and of its input no fp32 copy. Activation: not its output. MLP: nothing in it.
    """
    shape, itemsize, parts = run.shape, run.compute_bytes, run.recomputed_parts
    local = run.tokens / run.mesh.tp
    found = []
    for part in block_kept(run).parts:
        amount = part.amount
        if "attention" in parts and part.name == "attention scores":
            amount = 0.0
        elif "attention" in parts and part.name == "attention output":
            amount -= local * 4 * shape.heads
        elif "norm" in parts and part.name == "linear inputs":
            amount = 0.0
        elif "norm" in parts and part.name == "norm inputs":
            amount = min(amount, 2 * run.stream_tokens * shape.hidden * run.residual_bytes)
        elif part.name == "MLP intermediates" and "mlp" in parts:
            amount = 0.0
        elif part.name == "MLP intermediates" and "activation" in parts:
            amount = min(amount, local * shape.ffn * itemsize * (2 if shape.traits.gated else 1))
        found.append(leaf(part.name, amount))
    return group("block", *found)


def block_selected(run: Run) -> Term:
    """What a block saves under selective activation checkpointing: attention and some matmul outputs."""
    shape, part, itemsize = run.shape, run.tokens / run.mesh.tp, run.compute_bytes
    matrices = linears(shape, joined=run.traits.fused_qkv)
    kept = selected_matmuls(run, matrices)
    if run.compiled:
        # The compiler drops saved outputs that nothing reads: the block's last matmul, partial sums before they are
        # reduced over ranks, and the attention projection where the MLP does not read it.
        parallel_mlp = shape.traits.parallel_residual and shape.parallel_residual
        kept = [
            index
            for index in kept
            if index < len(matrices) - 1 and not (matrices[index].row and (parallel_mlp or run.mesh.tp > 1))
        ]
    matmuls = sum(run.tokens * matrices[index].local_sizes(run.mesh.tp)[1] for index in kept)
    # The narrow outputs of adapters' first factors; the second ones are recomputed.
    adapters = 0.0 if run.adapter is None else run.tokens * run.adapter.rank * len(adapted(run))
    attention = part * (shape.query_width * itemsize + 4 * shape.heads)
    # Outputs of collectives are saved too: both all-gathered inputs, and both reduce-scattered outputs.
    collectives = 0.0
    if run.mesh.tp > 1:
        collectives += (2 * run.tokens + (1 if run.compiled else 2) * part) * shape.hidden * itemsize
    if run.mesh.cp > 1:
        collectives += 2 * part * run.mesh.cp * shape.kv_width * itemsize
    return group(
        "block",
        leaf("input", block_input(run)),
        leaf("matmul outputs", matmuls * itemsize),
        leaf("adapter outputs", adapters * itemsize),
        leaf("attention output", attention),
        leaf("collective outputs", collectives),
    )


def selected_matmuls(run: Run, matrices: tuple[Linear, ...]) -> list[int]:
    """Indices of the matmuls whose outputs selective checkpointing saves (parallel/recompute.py)."""
    if run.traits.keeps == "every second":
        return list(range(0, len(matrices), 2))
    kept, widening = [], 0
    for index, one in enumerate(matrices):
        inputs, outputs = one.local_sizes(run.mesh.tp)
        if outputs > inputs:
            widening += 1
            if widening % 2:
                continue
        kept.append(index)
    return kept
