"""What a block needs for a time: temporaries of its forward pass, and gradients that its backward pass frees again."""

from shoal.plan.memory.activations import block_input, has_mlp_in_place, mlp_kept, needed, score_elements
from shoal.plan.memory.states import adapted
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import Counts
from shoal.plan.run.run import Run
from shoal.plan.terms import Term, group, leaf

# Tensors of the residual stream's size, in the compute dtype, that a compiled backward pass holds while it recomputes
# the block, beside its activations and their gradients, except where attention and MLP read the same input:
# benchmarks/gpu/sweep_h200.
RECOMPUTED_TEMPORARIES = 5
# Tensors of the residual stream's size that an eager block needs for a time in its forward pass: those of its norms,
# and the outputs of attention and MLP.
FORWARD_STREAM = 5


def forward_temporaries(run: Run) -> Term:
    """What the MLP of a block computes and does not save: its factors and their product."""
    tensors = 0 if run.recompute in ("none", "cheap", "parts", "offload-all") else 3 if run.shape.traits.gated else 2
    size = run.tokens / run.mesh.tp * run.shape.ffn * run.layer_bytes
    return group("block forward", leaf("MLP intermediates", tensors * size), leaf("DoRA matrices", _dora_matrices(run)))


def left_by_forward(run: Run) -> float:
    """Bytes of the blocks that the forward pass of a recomputed block leaves to the allocator, and that the tensors of
    the loss do not fit: the MLP's, two of the scores if they are materialized, and a few of the residual stream's size.
    """
    if not run.repeats_forward or run.loss != "plain":
        return 0.0
    scores = score_elements(run) * (4 + run.attention_bytes if not run.fuses_softmax else 2 * run.attention_bytes)
    logits = 4 * run.head_tokens * run.shape.vocab / run.mesh.tp
    largest = max(score_elements(run) * 4, run.tokens / run.mesh.tp * run.shape.ffn * run.layer_bytes)
    if logits < largest:
        return 0.0
    return forward_temporaries(run).amount + scores + FORWARD_STREAM * block_input(run)


def transient_gradients(run: Run) -> Term:
    """Transient gradients in the backward pass of a block: of its input, in its MLP, and of its weights before
    accumulation."""
    between = leaf("residual stream gradient", block_input(run))
    shape = run.shape
    parallel_mlp = shape.traits.parallel_residual and shape.parallel_residual
    recomputes = (run.recompute == "selective" or run.repeats_forward) and not parallel_mlp
    fuses = run.compiled and not run.traits.liger_kernels
    # The MLP's last layer is neither trained nor adapted: a compiled kernel writes one of the gradients over another,
    # and no input is recomputed for the gradient of a weight.
    frozen = fuses and "inner" not in needed(run) and shape.traits.gated
    recomputes = recomputes and fuses and not frozen
    width = run.stream_tokens * shape.hidden * run.compute_bytes
    # Of the MLP's inner activation and of what it was computed from: one kernel reads the first and writes the others.
    # A parallel MLP that was recomputed has freed one of the two by then: benchmarks/gpu/sweep_h200.
    widths = 3 if shape.traits.gated else 1 if parallel_mlp and run.repeats_forward else 2
    if frozen:
        widths = 2
    if has_mlp_in_place(run):
        widths = 1
    each = widths * run.layer_bytes
    if run.layer_bytes > run.compute_bytes:
        each -= run.compute_bytes  # the last layer's input, which has been freed by then
    inner = each * run.tokens / run.mesh.tp * shape.ffn
    return group(
        "block backward",
        between,
        leaf("MLP gradients", inner),
        # CheckpointFunction.backward in torch/utils/checkpoint.py holds what it has recomputed.
        leaf("block output", block_input(run) if run.traits.reentrant and run.repeats_forward else 0.0),
        # Attention's come when the MLP has freed its own, and what it had saved.
        leaf("attention score gradients", max(0.0, _score_gradients(run) - inner - mlp_kept(run))),
        leaf("recomputation temporaries", RECOMPUTED_TEMPORARIES * width if recomputes else 0.0),
        leaf("weight gradients before accumulation", _block_gradients(run)),
        leaf("DoRA matrices", _dora_matrices(run)),
    )


def _score_gradients(run: Run) -> float:
    """Gradients of materialized attention scores, beyond what was saved of them. PyTorch's softmax reads its output and
    the gradient in fp32, writes their product, and then the result in fp32, or in fp16 if that was its input
    (softmax_backward_cuda_out in aten/src/ATen/native/cuda/SoftMax.cu); the copy of its output in 16 bits is gone by
    then. A fused kernel writes its result over the gradient that it reads, as Megatron's does."""
    itemsize = run.attention_bytes
    if run.fuses_softmax:
        return score_elements(run) * itemsize
    result = 2 if itemsize == 2 and (run.precision == "16-mixed" or not run.gpu.bf16) else 4
    return score_elements(run) * (4 + 4 + result - (itemsize if itemsize < 4 else 0))


def _dora_matrices(run: Run) -> float:
    """What PEFT computes for the norms of the largest adapted layer, in the dtype of the adapter: the identity, `B A`,
    scaled, the matrix cast or dequantized, and their sum."""
    if run.adapter is None or not run.adapter.dora or not run.traits.peft:
        return 0.0
    sizes = [one.local_sizes(run.mesh.tp) for one in adapted(run)]
    stored = run.compute_bytes if run.narrow_adapters else 4
    return max(inputs * inputs + 4 * inputs * outputs for inputs, outputs in sizes) * stored


def _block_gradients(run: Run) -> float:
    """A block's weight gradients in the compute dtype, before they are accumulated."""
    if run.adapter is not None or not run.trained.blocks or run.sharded or not run.mixed:
        return 0.0
    if run.gradient_bytes == run.compute_bytes:
        return 0.0
    parameters = sum(one.parameters for one in linears(run.shape)) / run.mesh.tp
    return parameters * run.compute_bytes


def embedding_gradient(run: Run, counts: Counts) -> float:
    """The embedding's gradient beside the one that it is added to or cast to: that of the head, if they are tied, or of
    earlier micro-batches in another dtype. Autocast's is in fp32; in 16 bits the sum of a tied one is a tensor of its
    own, since the head's is a transposed view (llama3.2-1b in benchmarks/gpu/trainer_h200)."""
    if run.sharded:
        return 0.0
    trained = counts.embedding * run.trained.embedding
    if run.shape.tied and run.loss == "plain" and run.adapter is None:
        if not run.mixed:
            return 2 * trained * run.weight_bytes
        if run.casts_weights:
            return trained * run.weight_bytes
    if not run.shape.tied and (not run.mixed or run.gradient_bytes == run.compute_bytes):
        return 0.0
    return trained * run.compute_bytes
