"""What other systems hold longer than a step needs it, through references that they keep: see `SystemTraits`."""

from shoal.catalogue.architectures import architecture_of
from shoal.plan.memory.activations import block_input, quantized_input_bytes
from shoal.plan.memory.head import returned_bytes
from shoal.plan.memory.states import dequantized_bytes, has_quantized_head, trained_parameters
from shoal.plan.run.blocks import linears
from shoal.plan.run.layout import Rank
from shoal.plan.run.run import Run


def last_micro_batch(run: Run, rank: Rank) -> float:
    """What a loop that holds the last logits has of them at the end of the next forward pass: the inputs of quantized
    layers, and the logits, beside the new ones and the dequantized head. The longest of varied sequences hardly comes
    twice in a row."""
    if not run.traits.holds_last_logits or run.varied_lengths or not rank.last:
        return 0.0
    inputs = {one.reads: one.local_sizes(run.mesh.tp)[0] for one in linears(run.shape)}
    saved = sum(width * quantized_input_bytes(run, reads) for reads, width in inputs.items())
    kept = run.tokens * saved * rank.blocks
    vocabulary = run.shape.vocab / run.mesh.tp
    logits = 2 * run.head_tokens * vocabulary * _held_bytes(run)
    matrix = vocabulary * run.shape.hidden * dequantized_bytes(run, forward=True) if has_quantized_head(run) else 0.0
    return (kept if run.recompute == "none" else 0.0) + logits + matrix


def _held_bytes(run: Run) -> int:
    """Bytes per logit that such a loop holds: Lightning's Fabric returns what a model has computed in fp32
    (convert_output in fabric/plugins/precision)."""
    return run.compute_bytes if run.traits.narrow_loss else 4


def held_inputs(run: Run, rank: Rank) -> float:
    """The inputs of the blocks behind the first, and their gradients, which frozen units of FSDP1 keep to the end."""
    frozen = run.sharded and run.traits.flat_parameters and run.adapter is not None
    if not frozen or not run.traits.reentrant or run.recompute != "full":
        return 0.0
    return 2 * (rank.blocks - 1) * block_input(run)


def held_outputs(run: Run, rank: Rank) -> float:
    """What the model has returned and a loop holds in the backward pass: logits, and cached keys and values."""
    if not rank.last or run.loss != "plain":
        return 0.0
    logits = run.head_tokens * run.shape.vocab / run.mesh.tp
    if run.traits.holds_last_logits:
        return logits * _held_bytes(run)
    if not run.traits.holds_outputs:
        return 0.0
    logits *= returned_bytes(run)
    return logits + cached_keys(run, rank)


def outputs_at_end(run: Run, rank: Rank) -> float:
    """The same at the end of the backward pass and after it, when nothing else holds keys and values."""
    if run.traits.holds_outputs != "next":
        return 0.0
    return held_outputs(run, rank) + _keys_of_last_pass(run, rank)


def last_outputs(run: Run, rank: Rank) -> float:
    """The same of the micro-batch before, beyond what the peak of the loss has room for: it comes in the backward pass,
    when they are gone. In the forward pass, logits, their copy without the last token and the log-softmax are as large
    as what it is without the logits."""
    if run.traits.holds_outputs != "next":
        return 0.0
    logits = run.head_tokens * run.shape.vocab / run.mesh.tp * returned_bytes(run)
    return max(0.0, held_outputs(run, rank) - logits) + _keys_of_last_pass(run, rank)


def cached_keys(run: Run, rank: Rank) -> float:
    """Keys and values of all blocks that the model returns. Without activation checkpointing, attention has saved them
    anyway."""
    if not run.traits.caches_keys or not run.repeats_forward:
        return 0.0
    return 2 * run.tokens * run.shape.kv_width / run.mesh.tp * run.compute_bytes * rank.blocks


def _keys_of_last_pass(run: Run, rank: Rank) -> float:
    """Cached keys and values that are held beyond their pass, where no activation checkpointing is. Values, and keys
    that are not rotated, are views of the output of a joined layer, all of which they hold."""
    if not run.traits.caches_keys or run.repeats_forward or not run.shape.traits.causal or not rank.last:
        return 0.0
    shape, itemsize = run.shape, run.compute_bytes
    if shape.traits.fused_qkv or run.traits.fused_qkv or architecture_of(shape.model_type).joined:
        rotated = shape.kv_width * (4 if run.rotates_in_fp32 else itemsize) if shape.traits.rotary else 0.0
        each = (shape.query_width + 2 * shape.kv_width) * itemsize + rotated
    else:
        each = 2 * shape.kv_width * itemsize
    return run.tokens / run.mesh.tp * each * rank.blocks


def gradient_buckets(run: Run, gradients: float) -> float:
    """DDP's buckets beside the gradients that were copied from them."""
    copied = run.traits.copies_to_buckets and run.data_parallelism.ddp and run.world_size > 1
    return gradients if copied else 0.0


def added_gradients(run: Run, rank: Rank) -> float:
    """bf16 gradients of the last micro-batch that have been added to the fp32 ones."""
    keeps = run.traits.keeps_added_gradients and run.reduced_bytes > run.compute_bytes
    return trained_parameters(run, rank) * run.compute_bytes if keeps else 0.0
