"""The tensors that a block saves for the backward pass, one by one: the terms of `activations.block_kept`, divided."""

from shoal.plan.memory.activations import block_kept, score_elements
from shoal.plan.run.run import Run

# The parts of a block in order, and what their layers read (`Linear.reads`).
READS = {
    "norm": "",
    "attention": "norm",
    "projection": "attention",
    "second norm": "",
    "mlp": "second norm",
    "last": "inner",
}
PARTS = tuple(READS)


def kept_tensors(run: Run) -> dict[str, list[float]]:
    """Bytes of the tensors that a block saves, by the part of it that saves them."""
    found: dict[str, list[float]] = {part: [] for part in PARTS}
    width = run.tokens * run.shape.hidden
    sharded = run.tokens / run.mesh.tp  # with the channels of heads and MLP
    norms = ("norm",) if run.shape.shared_norm else ("norm", "second norm")
    for term in block_kept(run).parts:
        amount = term.amount
        if term.name == "norm inputs":
            for part in norms:
                found[part] += _divided(amount / len(norms), width * 4.0)
        elif term.name == "linear inputs":
            shards = run.mesh.tp if run.gathers_inputs_again else 1
            sizes = _divided(amount, width * run.compute_bytes / shards)
            half = -(-len(sizes) // len(norms))
            found["norm"] += sizes[:half]
            found["second norm"] += sizes[half:]
        elif term.name == "MLP intermediates":
            sizes = _divided(amount, sharded * run.shape.ffn * run.layer_bytes)
            joined = run.has_engine and run.shape.traits.gated
            found["mlp"] += [sum(sizes[:-1])] if joined and sizes[:-1] else sizes[:-1]
            found["last"] += sizes[-1:]
        elif term.name == "queries, keys, values":
            keys = sharded * run.shape.kv_width * run.attention_bytes
            found["attention"] += [
                *_divided(amount - 2 * keys, sharded * run.shape.query_width * run.attention_bytes),
                keys,
                keys,
            ]
        elif term.name == "attention output":
            found["projection"].append(amount)
        elif term.name == "attention scores":
            found["attention"] += _divided(amount, score_elements(run) * 4.0)
        elif term.name == "query and key norm inputs":
            queries = run.shape.query_width / (run.shape.query_width + run.shape.kv_width)
            for share in (queries, 1 - queries):
                scaled = 4.0 if run.traits.wide_norms else run.compute_bytes
                elements = amount * share / (4.0 + scaled)
                found["attention"] += [elements * 4.0, elements * scaled] if not run.compiled else [amount * share]
        elif term.name != "frozen weights in compute dtype":  # which are copies of weights: see `replay.Steps.forward`
            found["norm"].append(amount)
    return found


def _divided(amount: float, unit: float) -> list[float]:
    """Tensors of `unit` bytes that make up `amount`, and what remains."""
    count = int(amount / unit + 1e-6)
    rest = amount - count * unit
    return [unit] * count + ([rest] if rest > 0.01 * unit else [])
