"""Activation memory of one block: the tensors that autograd saves for the backward pass.

Autograd saves what the gradient formulas need. A trained linear layer needs its input; attention needs queries, keys,
values and its output; a norm needs its input; an activation function needs its input, and an elementwise multiplication
both factors. A compiled block recomputes cheap elementwise results from what it saves, but never an input that a matmul
reads in the backward pass.
"""

import math

from shoal.catalogue.architectures import architecture_of
from shoal.catalogue.model_shape import ModelShape
from shoal.plan.memory.states import adapted, has_joined_experts, quantizable
from shoal.plan.run.blocks import MLP, Linear, linears
from shoal.plan.run.run import FUSED_TOGETHER, Run
from shoal.plan.terms import Term, group, leaf

# The most tokens that a sequence is padded by for attention, if its length is a multiple of as many.
ATTENTION_PADDING = 128
# The names that `Linear.reads` gives the outputs of norms.
NORMS = {"norm", "second norm"}
# The first layers of fused adapters' functions, whose dropout is that of the function.
FIRST_FUSED = {layers[0] for layers in FUSED_TOGETHER}


def block_kept(run: Run) -> Term:
    """Bytes that a block saves per micro-batch without activation checkpointing."""
    full, local = run.tokens, run.tokens / run.mesh.tp
    parts = *_norms(run, run.stream_tokens), *_inputs(run, full), *_attention(run, full), *_mlp(run, local), *_dora(run)
    copied = run.tokens * padded_adapters(run)[0] * run.compute_bytes
    parts = *parts, leaf("outputs of padded adapters", copied)
    # Autocast keeps its copies of weights that are trained, and the backward pass frees them with the others. Of frozen
    # ones every layer saves a copy of its own.
    copies = 0.0
    if run.casts_weights and run.adapter is not None:
        copies = sum(one.parameters for one in linears(run.shape)) / run.mesh.tp * run.compute_bytes
    return group("block", *parts, *_routed(run, full), leaf("frozen weights in compute dtype", copies))


def block_input(run: Run) -> float:
    """Bytes that a fully checkpointed block saves: its input."""
    return run.stream_tokens * run.shape.hidden * run.residual_bytes


def buffer_bytes(run: Run) -> float:
    """Bytes of the pinned buffer for one block input: torch rounds pinned memory up to a power of two."""
    return float(2 ** math.ceil(math.log2(max(1.0, block_input(run)))))


def _norms(run: Run, tokens: float) -> list[Term]:
    """The inputs of the two norms: the residual stream."""
    shape, stream, itemsize = run.shape, run.residual_bytes, run.compute_bytes
    architecture = architecture_of(shape.model_type)
    each = float(stream)
    if run.compiled:
        # Instead of the second norm's input, the compiler saves what attention added to the first one's, which is in
        # the compute dtype.
        each = stream if run.traits.liger_kernels else (stream + itemsize) / 2
    elif run.traits.unfused_norms and shape.traits.rms_norm:
        # Eager RMSNorm saves an fp32 copy of its input and, if its scale is trained, the normalized input too.
        each = 4.0 + ((4 if run.traits.wide_norms else stream) if run.trained.blocks else 0)
    both = 2 * each
    if shape.shared_norm:
        both = stream if run.compiled else each
    if shape.traits.post_norm and run.compiled:
        both = _post_norms(run)
    elif run.recomputes_cheap and stream > itemsize and shape.traits.parallel_residual and shape.parallel_residual:
        both = stream  # attention and MLP read norms of the same input, from which both are recomputed
    elif architecture.output_norms and run.compiled:
        both = 2 * itemsize  # what attention and MLP return; the stream itself is read by linear layers alone
    if architecture.norms > 2:
        # Norms before and after attention and MLP. The compiler saves what attention returns already.
        both += itemsize if run.compiled else 2 * each
    found = [leaf("norm inputs", tokens * shape.hidden * both)]
    if has_head_norms(run):
        width = shape.query_width + shape.kv_width
        found.append(leaf("query and key norm inputs", tokens * width * (each if not run.compiled else itemsize)))
    if run.dropout:
        found.append(leaf("dropout masks", tokens * 2 * shape.hidden))
    return found


def has_head_norms(run: Run) -> bool:
    """Whether queries and keys are normalized, by head or all heads together."""
    return run.shape.traits.head_norms or architecture_of(run.shape.model_type).head_norms != "none"


def _post_norms(run: Run) -> float:
    """Bytes per element that the compiler saves for norms of the residual stream itself: their inputs, which follow
    from nothing that is saved elsewhere, and the output of one matmul, unless dropout is between it and the sum."""
    stream, itemsize = run.residual_bytes, run.compute_bytes
    if run.recomputes_cheap:
        return stream + 2 * itemsize
    return 2 * stream + (0 if run.dropout else itemsize)


def _inputs(run: Run, tokens: float) -> list[Term]:
    """Inputs of the linear layers after the two norms; all-gathered under tensor parallelism, so not sharded, unless
    they are gathered again."""
    shape, itemsize = run.shape, _input_bytes(run)
    read = needed(run)
    kept = _normed(shape, read)
    joined = linears(shape, joined=run.traits.fused_qkv)
    if run.adapter is None:
        casts = run.traits.casts_per_use or shape.traits.post_norm
        if casts and run.mixed and (not run.compiled or run.traits.liger_kernels):
            # A norm's output is cast separately for each linear layer that reads it, by autocast or because it is the
            # residual stream; the compiler casts it once.
            kept = sum(1 for one in joined if one.reads in read & NORMS)
    elif run.traits.peft:
        return [_peft_inputs(run, tokens), *_dropped(run, tokens)]
    if run.recomputes_cheap and run.mesh.tp == 1 and itemsize > 1:
        kept = 0  # recomputed from the norm's input, unless it was all-gathered or cast to fp8
    saved = run.stream_tokens if run.gathers_inputs_again else tokens
    found = [leaf("linear inputs", saved * kept * shape.hidden * itemsize)]
    return [*found, *_dropped(run, tokens)]


def _peft_inputs(run: Run, tokens: float) -> Term:
    """PEFT casts an input for each adapted layer on its own, unless adapters have its dtype; and quantized matmuls may
    save theirs, which all share unless each 4-bit one casts it from fp32. The MLP's last input is with the MLP."""
    own = [] if dropped_inputs(run) else [one for one in adapted(run) if one.reads != "inner"]
    saved_once = [one for one in own if run.narrow_adapters or run.fuses_adapter(one.name)]
    width = run.adapter_input_bytes * sum(one.local_sizes(run.mesh.tp)[0] for one in own if one not in saved_once)
    width += run.compute_bytes * _normed(run.shape, {one.reads for one in saved_once}) * run.shape.hidden
    if saved := quantized_input_bytes(run, "norm"):
        frozen = [one for one in quantizable(run) if one.reads in NORMS]
        casts = run.layer_bytes > run.compute_bytes and not run.in_int8
        shared = len(frozen) if casts else _normed(run.shape, {one.reads for one in frozen})
        width += saved * shared * run.shape.hidden
    return leaf("linear inputs", tokens * width)


def _normed(shape: ModelShape, read: set[str]) -> int:
    """How many of the tensors that layers read are outputs of norms: one if attention and MLP share it."""
    return min(len(read & NORMS), 1 if shape.shared_norm else len(NORMS))


def _dropped(run: Run, tokens: float) -> list[Term]:
    """Dropout of adapters: the mask and, unless compiled, what the adapter reads instead of the layer's input."""
    if run.adapter is None or not run.adapter.dropout:
        return []
    saved = 1 + (run.adapter_input_bytes if dropped_inputs(run) else 0)
    width = sum(one.local_sizes(run.mesh.tp)[0] for one in _with_dropout(run))
    return [leaf("adapter dropout", tokens * width * saved)]


def _attention(run: Run, tokens: float) -> list[Term]:
    shape, tp = run.shape, run.mesh.tp
    itemsize = run.attention_bytes
    query, keys = shape.query_width, shape.kv_width
    # The memory-efficient kernel, which fp32 needs, has no grouped keys.
    repeated = run.traits.repeats_keys or (run.precision == "32-true" and not run.gpu.is_cpu)
    held = query if repeated and not run.recomputes_cheap else keys
    # Context parallelism by all-gather holds the keys and values of all ranks.
    across = run.mesh.cp if run.cp_method == "gather" else 1
    width = float(query + 2 * held * across)
    joined = shape.traits.fused_qkv or run.traits.fused_qkv or architecture_of(shape.model_type).joined
    # Transformer Engine copies what is not contiguous (get_qkv_layout in attention/dot_product_attention/utils.py), and
    # so do repeated values.
    no_views = run.has_engine or (run.traits.repeats_keys and keys < query and not run.recomputes_cheap)
    if joined and shape.traits.rotary and not no_views:
        # Values are a view of the fused QKV output, which stays allocated beside the rotated queries and keys.
        width += query + keys
    kept = width * itemsize
    if run.rotates_in_fp32:
        # Written-out attention reads them as they are; a fused kernel casts them, and the cache has the keys.
        kept += (query + keys) * (4 - itemsize) if run.attention == "scores" else 4 * keys * run.traits.caches_keys
    found = [
        leaf("queries, keys, values", tokens / tp * kept),
        leaf("attention output", tokens / tp * (query * itemsize + 4 * shape.heads)),
    ]
    if run.traits.pads_attention:
        more = ATTENTION_PADDING / run.length * (kept + query * itemsize)
        copied = query * itemsize if "attention" in needed(run) else 0
        found.append(leaf("attention padding", tokens / tp * (more + copied)))
    if _input_bytes(run) < itemsize and "attention" in needed(run):
        found.append(leaf("attention output in fp8", tokens / tp * query))
    if run.attention == "scores":
        # The softmax, and what the next matmul reads, unless it is the same: a copy in another dtype, or what dropout
        # leaves, with the mask.
        again = False
        wide = itemsize < 4 and (run.upcasts_softmax or run.autocasts_softmax)
        if wide and run.fuses_softmax:
            # Of a compiled one the scores, from which it is computed again, and what the matmul reads.
            wide, again = False, True
        again = again or wide or run.attention_dropout or run.traits.written_out
        scores = (4 if wide else itemsize) + (itemsize if again else 0) + run.attention_dropout
        scores += itemsize if run.clamps_scores else 0
        found.append(leaf("attention scores", score_elements(run) * scores))
    return found


def score_elements(run: Run) -> float:
    """Attention scores of a block, where they are materialized."""
    if run.attention != "scores":
        return 0.0
    return run.tokens / run.mesh.tp * run.shape.heads * run.length


def attention_masks(run: Run) -> float:
    """Bytes of the masks that attention reads, once for all blocks."""
    if run.attention == "dense mask":
        # As booleans, and as the bias that attention adds.
        return run.micro_batch * run.length * (run.length / run.mesh.cp) * (1 + run.compute_bytes)
    return 0.0


def mlp_kept(run: Run) -> float:
    """Bytes that the MLP of a block saves."""
    return sum(part.amount for part in _mlp(run, run.tokens / run.mesh.tp))


def _mlp(run: Run, tokens: float) -> list[Term]:
    shape = run.shape
    inner = _input_bytes(run) if "inner" in needed(run) else 0
    if run.adapter is not None and run.traits.peft:
        own = not dropped_inputs(run) and any(one.reads == "inner" for one in adapted(run))
        inner = run.adapter_input_bytes * own + quantized_input_bytes(run, "inner")
    again = run.traits.multiplies_again and shape.traits.gated
    if (run.recomputes_cheap and inner > 1) or has_mlp_in_place(run) or again:
        inner = 0
    # Gated: both factors, and their product as the input of the last linear layer; eager also the activation's output.
    fused = run.fuses_activation
    factors = (2 if fused else 3) if shape.traits.gated else 1
    if shape.traits.saves_activation and inner:
        factors -= 1
    wide = 0
    if run.writes_out_gelu and not shape.traits.recomputed_gelu:
        # Beside its input: half of that, its tanh, and one more than that; of these all but the second in fp32 under
        # autocast, on a GPU.
        factors += 3
        wide = 6 if run.in_autocast and run.layer_bytes == 2 and not run.gpu.is_cpu else 0
    elif run.writes_out_erf:
        # Half of its input, what erf reads, and one more than what that returns, in place of the input.
        factors += 2
    if shape.traits.gated and run.traits.written_out and not fused:
        factors += 1
    return [leaf("MLP intermediates", tokens * shape.ffn * (factors * run.layer_bytes + wide + inner))]


def _routed(run: Run, tokens: float) -> list[Term]:
    """What each expert reads, if it is trained, and returns, before its results are weighted and summed."""
    copies = run.shape.routed * (2 if run.trained.blocks else 1)
    return [leaf("expert inputs and outputs", tokens * copies * run.shape.hidden * run.compute_bytes)]


def has_mlp_in_place(run: Run) -> bool:
    """Whether the backward pass of the MLP works in the tensors that it has saved."""
    return run.fuses_adapter("down_proj") and run.shape.traits.gated


def _dora(run: Run) -> list[Term]:
    """The output of each adapted layer before it is multiplied by magnitude and norm, for the magnitude's gradient. The
    compiler saves the MLP's factors as these, and multiplies again."""
    if run.adapter is None or not run.adapter.dora:
        return []
    targets = adapted(run)
    if run.traits.peft:
        # PEFT's adapters save their own output too, and with dropout the matrix that the output is computed from again.
        found = [leaf("DoRA outputs", run.tokens * 2 * sum(one.outputs for one in targets) * run.compute_bytes)]
        if run.adapter.dropout:
            matrices = sum(one.parameters for one in targets) * run.adapter_bytes
            found.append(leaf("DoRA matrices for the backward pass", matrices))
        return found
    if run.compiled:
        targets = [one for one in targets if one.outputs != run.shape.ffn]
    return [leaf("DoRA outputs", run.tokens * sum(one.outputs for one in targets) * run.compute_bytes)]


def _input_bytes(run: Run) -> int:
    """Bytes per element of a linear layer's input, as saved for the weight gradient; an adapter's is not in fp8."""
    in_fp8 = run.precision == "fp8" and run.traits.saves_fp8_inputs and run.adapter is None
    return 1 if in_fp8 else run.compute_bytes


def needed(run: Run) -> set[str]:
    """The inputs that autograd saves for the weight gradients of trained or adapted linear layers."""
    matrices = linears(run.shape)
    adapter = run.adapter
    if adapter is None:
        return {one.reads for one in matrices} if run.trained.blocks else set()
    saved = {one.reads for one in matrices if quantized_input_bytes(run, one.reads)}
    if dropped_inputs(run):
        return saved
    return saved | {one.reads for one in matrices if one.name in adapter.targets}


def quantized_input_bytes(run: Run, reads: str) -> int:
    """Bytes per element of the inputs that frozen quantized matmuls save, by `Linear.reads`. bitsandbytes' 8-bit ones
    always do, before they cast them, and before 0.45 also their quantized transpose (MatMul8bitLt in
    bitsandbytes/autograd/_functions.py)."""
    if has_joined_experts(run) and reads in MLP:
        return 0
    if run.in_int8:
        return run.read_bytes(reads) + run.traits.int8_layouts
    quantize = None if run.adapter is None else run.adapter.quantize
    if quantize == "int8":
        return (run.compute_bytes + 1) * run.traits.quantized_keep_inputs
    return run.compute_bytes if quantize in ("nf4", "fp4") and run.traits.quantized_keep_inputs else 0


def padded_adapters(run: Run) -> tuple[float, float]:
    """(outputs of adapters that are copied into zeros, those of their joined layer that have none), of a block: where
    not all of queries, keys and values have one. The copy saves what it has copied."""
    if run.adapter is None or not run.traits.joined_adapters or run.compiled:
        return 0.0, 0.0
    joined = sum(one.outputs for one in linears(run.shape) if one.name in FUSED_TOGETHER[0])
    own = sum(one.outputs for one in adapted(run) if one.name in FUSED_TOGETHER[0])
    return (float(own), float(joined - own)) if own < joined else (0.0, 0.0)


def held_by_functions(run: Run) -> dict[str, float]:
    """Bytes of a checkpointed block that 8-bit layers hold all the same, until the loss is gone, by `Linear.reads`:
    their inputs, which their functions have in attributes, and not with the saved tensors that checkpointing leaves
    out. Reentrant, it runs the forward pass without autograd."""
    if not run.in_int8 or run.traits.reentrant or not run.repeats_forward:
        return {}
    inputs = {one.reads: one.local_sizes(run.mesh.tp)[0] for one in quantizable(run)}
    if run.shape.shared_norm:
        inputs.pop("second norm", None)
    return {reads: run.tokens * width * quantized_input_bytes(run, reads) for reads, width in inputs.items()}


def dropped_inputs(run: Run) -> bool:
    """Whether an adapter saves its input after dropout instead of its layer's input, which the compiler recomputes."""
    return run.adapter is not None and run.adapter.dropout and not run.compiled


def _with_dropout(run: Run) -> list[Linear]:
    """The adapted layers with a dropout of their own: of a joined QKV layer, one; of fused adapters, the first of a
    function, whose input is dropped before."""
    found = [one for one in adapted(run) if not run.fuses_adapter(one.name) or one.name in FIRST_FUSED]
    if not run.traits.fused_qkv:
        return found
    return [one for one in found if one.reads != "norm"] + [one for one in found if one.reads == "norm"][:1]
