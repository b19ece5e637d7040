"""Shapes of models: counting their parameters, making one from explicit sizes, finding a published one by name.

Facts and arithmetic only, so that the forecast answers without torch. `shoal.models.families` turns a shape
into the transformers config it stands for.
"""

from shoal.catalogue.named_shapes import FAMILIES, FORECAST_ONLY, NAMED, Family, ModelShape, RopeScaling
from shoal.mistakes import UserMistake, suggestion

__all__ = [
    "FAMILIES",
    "FORECAST_ONLY",
    "NAMED",
    "Family",
    "ModelShape",
    "RopeScaling",
    "block_matrices",
    "block_vectors",
    "default_ffn",
    "embedding_parameters",
    "find_shape",
    "head_parameters",
    "parameters",
    "shape_from_sizes",
]


def block_matrices(shape: ModelShape) -> int:
    """Weights of one block that take part in matrix products."""
    attention = shape.hidden * (2 * shape.query_width + 2 * shape.kv_width)
    feed_forward = shape.hidden * shape.ffn * (3 if shape.traits.gated else 2)
    return attention + feed_forward


def block_vectors(shape: ModelShape) -> int:
    """Weights of one block that are biases and norms, and what else is in no product that is counted."""
    traits = shape.traits
    count = 2 * _norm(shape) + shape.others
    if traits.linear_bias or traits.qkv_bias:
        count += shape.query_width + 2 * shape.kv_width
    if traits.linear_bias:
        count += shape.hidden + shape.ffn + shape.hidden
    if traits.head_norms:
        count += 2 * shape.head_size
    return count


def embedding_parameters(shape: ModelShape) -> int:
    """Weights before the first block: tokens, and positions, segments and a norm where the family has them."""
    traits = shape.traits
    rows = shape.vocab + traits.segments + (shape.positions if traits.learned_positions else 0)
    return rows * shape.hidden + (_norm(shape) if shape.family == "bert" else 0)


def head_parameters(shape: ModelShape) -> int:
    """Weights after the last block, without the output matrix when it is the embedding's."""
    count = 0 if shape.tied else shape.vocab * shape.hidden
    if shape.traits.final_norm:
        count += _norm(shape)
    if shape.family == "bert":
        # BERT's head has a linear layer and a norm of its own, and a bias per token.
        count += shape.hidden * shape.hidden + shape.hidden + _norm(shape) + shape.vocab
    return count


def parameters(shape: ModelShape) -> int:
    """The exact number of parameters, a tied head counted once."""
    blocks = shape.layers * (block_matrices(shape) + block_vectors(shape))
    return embedding_parameters(shape) + blocks + head_parameters(shape)


def _norm(shape: ModelShape) -> int:
    return shape.hidden * (2 if shape.traits.norm_bias else 1)


def default_ffn(family: str, hidden: int) -> int:
    """The feed-forward width when none is given.

    Gated families get 8/3 of hidden, which costs what 4 × hidden costs ungated, rounded up to a multiple
    of 64: even small models then split over 8 ranks into widths a tensor core likes.
    """
    if not FAMILIES[family].gated:
        return 4 * hidden
    return -(-8 * hidden // (3 * 64)) * 64


def shape_from_sizes(
    family: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int | None = None,
    ffn: int | None = None,
    vocab: int,
    positions: int,
    tied: bool,
) -> ModelShape:
    """The shape with these sizes and the family's habits for the rest; contradictions are the user's mistake."""
    buildable = [name for name in FAMILIES if name not in FORECAST_ONLY]
    if family not in buildable:
        reason = "is for the forecast only, in its named sizes" if family in FORECAST_ONLY else "is not one we know"
        raise UserMistake(
            f"The model family '{family}' {reason}; use one of {', '.join(buildable)}.{suggestion(family, buildable)}"
        )
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "vocab": vocab, "positions": positions}
    optional = {"kv_heads": kv_heads, "ffn": ffn}
    for name, size in [*sizes.items(), *((name, size) for name, size in optional.items() if size is not None)]:
        if size < 1:
            raise UserMistake(f"The model's {name} is {size}: it must be at least 1.")
    traits = FAMILIES[family]
    shape = ModelShape(
        family=family,
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads if kv_heads is None else kv_heads,
        ffn=default_ffn(family, hidden) if ffn is None else ffn,
        vocab=vocab,
        positions=positions,
        tied=tied,
        norm_eps=traits.norm_eps,
        rope_theta=traits.rope_theta,
        rotary_share=traits.rotary_share,
    )
    _refuse_contradictions(shape)
    return shape


def _refuse_contradictions(shape: ModelShape) -> None:
    if shape.hidden % shape.heads:
        raise UserMistake(
            f"hidden ({shape.hidden}) does not divide into {shape.heads} heads: make hidden a multiple of heads."
        )
    if not shape.traits.grouped and shape.kv_heads != shape.heads:
        raise UserMistake(
            f"kv_heads ({shape.kv_heads}) has no meaning for the family {shape.family}, where every head has its own "
            f"keys and values: leave kv_heads out, or use llama, mistral, qwen2 or qwen3."
        )
    if shape.heads % shape.kv_heads:
        raise UserMistake(
            f"{shape.heads} heads cannot share {shape.kv_heads} kv_heads evenly: make heads a multiple of kv_heads."
        )
    if shape.family == "bert" and not shape.tied:
        raise UserMistake(
            "bert with tied: false has a bias that nothing uses and no gradient reaches: leave tied at true."
        )
    if not shape.traits.rotary:
        return
    if shape.head_size % 2:
        raise UserMistake(
            f"Each head has {shape.head_size} channels (hidden {shape.hidden} / heads {shape.heads}), and rotary "
            f"positions turn channels in pairs: choose sizes that give an even number."
        )
    if int(shape.head_size * shape.rotary_share) < 1:
        raise UserMistake(
            f"The family {shape.family} gives {shape.rotary_share:.0%} of each head's channels a position, and of "
            f"{shape.head_size} channels that is none: choose fewer heads or a larger hidden."
        )


def find_shape(name: str) -> ModelShape:
    """The published shape called `name`, in any case."""
    try:
        return NAMED[name.strip().lower()]
    except KeyError:
        raise UserMistake(
            f"No model shape is called '{name}'.{suggestion(name, NAMED)} "
            f"Explicit sizes work too; the names are {', '.join(NAMED)}."
        ) from None
