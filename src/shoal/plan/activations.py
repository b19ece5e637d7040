"""What one block keeps for its backward pass, tensor by tensor.

The rule behind the numbers: autograd keeps what the gradient formulas need. A matrix that is trained needs its input;
attention needs queries, keys, values and its result; a norm needs its input; an activation function needs its input,
and a product both factors. A compiled block makes again what is cheap to make from what it keeps, but never what a
matrix product reads in the backward pass.
"""

from shoal.plan.blocks import Linear, joins_queries, linears, writes_norms_out
from shoal.plan.run import Run
from shoal.plan.terms import Term, group, leaf

# What `Linear.reads` calls the results of norms.
NORMS = {"norm", "second norm"}


def block_kept(run: Run) -> Term:
    """Everything a block without recomputation keeps for one pass, in bytes."""
    whole, part = run.tokens, run.tokens / run.mesh.tp
    return group("block", *_norms(run, part), *_inputs(run, whole), *_attention(run, whole), *_mlp(run, part))


def block_input(run: Run) -> float:
    """What a block that is recomputed keeps: its input."""
    return run.tokens / run.mesh.tp * run.shape.hidden * run.stream_bytes


def block_selected(run: Run) -> Term:
    """What a block keeps under selective recomputation: attention, and some of its matrix products."""
    shape, part, number = run.shape, run.tokens / run.mesh.tp, run.compute_bytes
    matrices = linears(shape, joined=run.traits.joins_queries)
    kept = selected_products(run, matrices)
    if run.compiled:
        # What nothing needs is not kept after all: the block's last product, and sums over ranks before they are sums;
        # nor attention's, where the feed-forward part does not read it.
        apart = shape.family == "neox" and shape.parallel_residual
        kept = [
            index
            for index in kept
            if index < len(matrices) - 1 and not (matrices[index].row and (apart or run.mesh.tp > 1))
        ]
    products = sum(run.tokens * matrices[index].cut(run.mesh.tp)[1] for index in kept)
    attention = part * (shape.query_width * number + 4 * shape.heads)
    # Results that came over the network are kept too: both gathered inputs, and both scattered outputs.
    exchanged = 0.0
    if run.mesh.tp > 1:
        exchanged += (2 * run.tokens + (1 if run.compiled else 2) * part) * shape.hidden * number
    if run.mesh.cp > 1:
        exchanged += 2 * part * run.mesh.cp * shape.kv_width * number
    return group(
        "block",
        leaf("input", block_input(run)),
        leaf("matrix products", products * number),
        leaf("attention's result", attention),
        leaf("exchanged", exchanged),
    )


def selected_products(run: Run, matrices: tuple[Linear, ...]) -> list[int]:
    """Which of a block's products selective recomputation keeps (parallel/recompute.py)."""
    if run.traits.keeps == "every second":
        return list(range(0, len(matrices), 2))
    kept, widening = [], 0
    for index, one in enumerate(matrices):
        inputs, outputs = one.cut(run.mesh.tp)
        if outputs > inputs:
            widening += 1
            if widening % 2:
                continue
        kept.append(index)
    return kept


def _norms(run: Run, tokens: float) -> list[Term]:
    """The inputs of the two norms, which are also the residual stream."""
    shape, stream, number = run.shape, run.stream_bytes, run.compute_bytes
    each = float(stream)
    if run.compiled:
        # Of the second norm's input the compiler keeps what attention added to the first's, which is no wider than
        # what a matrix makes.
        each = stream if run.traits.liger_kernels else (stream + number) / 2
    elif run.traits.written_out_norms and writes_norms_out(shape):
        # RMSNorm in PyTorch: an fp32 copy of its input, and where its scale is trained the normed input too.
        each = 4.0 + (stream if run.trained.blocks else 0)
    found = [leaf("inputs of the norms", tokens * 2 * shape.hidden * each)]
    if shape.traits.head_norms:
        width = shape.query_width + shape.kv_width
        found.append(leaf("inputs of the head norms", tokens * width * (each if not run.compiled else number)))
    if run.dropout:
        found.append(leaf("dropout masks", tokens * 2 * shape.hidden))
    return found


def _inputs(run: Run, tokens: float) -> list[Term]:
    """What the matrices read after the two norms; tensor parallelism gathers it, so every rank has it whole."""
    shape, number = run.shape, _input_bytes(run)
    read = needed(run)
    kept = len(read & NORMS)
    if run.traits.casts_each_use and run.mixed and (not run.compiled or run.traits.liger_kernels):
        # Autocast rounds a norm's result anew for each matrix that reads it; the compiler does so once.
        kept = sum(1 for one in linears(shape, joined=run.traits.joins_queries) if one.reads in read & NORMS)
    if run.forgets_cheap and run.mesh.tp == 1 and number > 1:
        kept = 0  # made again from the norm's input; not what came over the network or was rounded to 8 bits
    found = [leaf("inputs of the matrices", tokens * kept * shape.hidden * number)]
    if run.adapter is not None and run.adapter.dropout and "norm" in read:
        found.append(leaf("adapters' dropout", tokens * shape.hidden * (number + 1)))
    return found


def _attention(run: Run, tokens: float) -> list[Term]:
    shape, number, cut = run.shape, run.compute_bytes, run.mesh.tp
    query, keys = shape.query_width, shape.kv_width
    held = query if run.traits.repeats_keys else keys
    # Context parallelism by gathering has the keys and values of all ranks.
    across = run.mesh.cp if run.cp_method == "gather" else 1
    width = float(query + 2 * held * across)
    if (joins_queries(shape) or run.traits.joins_queries) and shape.traits.rotary:
        # Values are a view of the joined result, which stays whole beside the turned queries and keys.
        width += query + keys
    found = [
        leaf("queries, keys, values", tokens / cut * width * number),
        leaf("attention's result", tokens / cut * (query * number + 4 * shape.heads)),
    ]
    if _input_bytes(run) < number and "attention" in needed(run):
        found.append(leaf("attention's result in 8 bits", tokens / cut * query))
    if run.attention == "eager":
        # The softmax in fp32, and its copy to compute with.
        scores = 4.0 + (number if number < 4 else 0) + (1 if run.dropout else 0)
        found.append(leaf("attention scores", tokens / cut * shape.heads * run.length * scores))
    return found


def _mlp(run: Run, tokens: float) -> list[Term]:
    shape, number = run.shape, run.compute_bytes
    inner = _input_bytes(run) if "inner" in needed(run) else 0
    if run.forgets_cheap and inner > 1:
        inner = 0
    # Gated: both factors, and their product for the last matrix; not compiled, the activation's result as well.
    factors = (2 if run.compiled else 3) if shape.traits.gated else 1
    if shape.family == "gpt2" and not run.compiled:
        factors += 3  # its GELU is written out
    return [leaf("inside the feed-forward", tokens * shape.ffn * (factors * number + inner))]


def _input_bytes(run: Run) -> int:
    """Bytes of a number of what a matrix reads, as it is kept for the matrix's gradient."""
    return 1 if run.precision == "fp8" and run.traits.eight_bit_inputs else run.compute_bytes


def needed(run: Run) -> set[str]:
    """The tensors that trained or adapted matrices read, and that are kept for that."""
    matrices = linears(run.shape)
    adapter = run.adapter
    if adapter is None:
        return {one.reads for one in matrices} if run.trained.blocks else set()
    if adapter.quantize is not None and run.traits.quantized_keep_inputs:
        return {one.reads for one in matrices}
    return {one.reads for one in matrices if one.name in adapter.targets}
