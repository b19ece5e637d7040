"""Model shapes: parameter counts, shapes from explicit sizes, and published shapes by name.

Does not import torch, so that the forecast stays fast. `shoal.models.families` converts a shape into a transformers
config.
"""

from math import gcd

from shoal.catalogue.families import BUILDABLE, FAMILIES, listed
from shoal.catalogue.model_shape import LatentAttention, ModelShape, RopeScaling
from shoal.catalogue.named_shapes import NAMED
from shoal.mistakes import UserMistake, suggestion

__all__ = [
    "NAMED",
    "VOCABULARY_MULTIPLE",
    "LatentAttention",
    "ModelShape",
    "RopeScaling",
    "attention_matrices",
    "block_matrices",
    "block_vectors",
    "default_ffn",
    "embedding_parameters",
    "find_shape",
    "grown_vocabulary",
    "head_parameters",
    "parameters",
    "shape_from_sizes",
]

# Most vocabularies are multiples of this. The head's matmuls in bf16 are fast for a multiple of 8, also in each shard
# of tensor parallelism.
VOCABULARY_MULTIPLE = 64


def grown_vocabulary(vocabulary: int, tokens: int) -> int:
    """`vocabulary`, or if it is less than `tokens` the next size above that is a multiple of the same power of two, up
    to 64."""
    multiple = gcd(vocabulary, VOCABULARY_MULTIPLE)
    return vocabulary if tokens <= vocabulary else -(-tokens // multiple) * multiple


def block_matrices(shape: ModelShape) -> int:
    """Matmul parameters of one block."""
    attention = sum(inputs * outputs for _, inputs, outputs in attention_matrices(shape))
    feed_forward = shape.hidden * shape.ffn * (3 if shape.traits.gated else 2)
    return attention + feed_forward


def attention_matrices(shape: ModelShape) -> list[tuple[str, int, int]]:
    """The linear layers of attention in forward order: name, inputs, outputs. A fused one is the first of two."""
    hidden, query, keys, names = shape.hidden, shape.query_width, shape.kv_width, shape.traits.names.attention
    if (latent := shape.latent) is not None:
        channels = latent.plain + latent.rotated
        down, up = ("q_a_proj", hidden, latent.query_rank), ("q_b_proj", latent.query_rank, shape.heads * channels)
        return [
            *((down, up) if latent.query_rank else (("q_proj", hidden, shape.heads * channels),)),
            ("kv_a_proj_with_mqa", hidden, latent.kv_rank + latent.rotated),
            ("kv_b_proj", latent.kv_rank, shape.heads * (latent.plain + latent.value)),
            ("o_proj", shape.heads * latent.value, hidden),
        ]
    if shape.traits.fused_qkv:
        return [(names[0], hidden, query + 2 * keys), (names[1], query, hidden)]
    return [
        *((name, hidden, width) for name, width in zip(names[:-1], (query, keys, keys), strict=True)),
        (names[-1], query, hidden),
    ]


def block_vectors(shape: ModelShape) -> int:
    """Parameters of one block outside matmuls: biases, norms and others."""
    traits = shape.traits
    count = (1 if shape.shared_norm else 2) * _norm(shape) + shape.others
    if traits.linear_bias or traits.qkv_bias:
        count += shape.query_width + 2 * shape.kv_width
    if traits.linear_bias:
        count += shape.hidden + shape.ffn + shape.hidden
    if traits.biased:
        count += sum(shape.ffn if name in traits.names.mlp[:-1] else shape.hidden for name in traits.biased)
    if traits.head_norms:
        count += 2 * shape.head_size
    if shape.latent is not None:
        count += shape.latent.query_rank + shape.latent.kv_rank
    return count


def embedding_parameters(shape: ModelShape) -> int:
    """Parameters before the first block: token embedding, and positions, segments and a norm if the family has them."""
    traits = shape.traits
    rows = shape.vocab + traits.segments
    rows += shape.positions + traits.spare_positions if traits.learned_positions else 0
    return rows * shape.hidden + (_norm(shape) if traits.embedding_norm else 0) + shape.outside


def head_parameters(shape: ModelShape) -> int:
    """Parameters after the last block, without lm_head if it is tied to the embedding."""
    count = 0 if shape.tied else shape.vocab * shape.hidden
    if shape.traits.final_norm:
        count += _norm(shape)
    if shape.traits.head_bias:
        count += shape.vocab
    if shape.traits.head_transform:
        # A linear layer, a norm, and a bias per token.
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

    Gated families get 8/3 of hidden, which has the cost of 4 × hidden without gating, rounded up to a multiple of 64,
    so that even small models split over 8 ranks into widths that suit tensor cores.
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
    head_size: int | None = None,
    ffn: int | None = None,
    vocab: int,
    positions: int,
    tied: bool,
) -> ModelShape:
    """The shape with these sizes and the family's defaults for the rest; a UserMistake if they are inconsistent."""
    if family not in FAMILIES:
        raise UserMistake(
            f"The model family '{family}' is unknown; use one of {', '.join(BUILDABLE)}.{suggestion(family, FAMILIES)}"
        )
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "vocab": vocab, "positions": positions}
    optional = {"kv_heads": kv_heads, "head_size": head_size, "ffn": ffn}
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
        head_size=head_size or 0,
        norm_eps=traits.norm_eps,
        rope_theta=traits.rope_theta,
        rotary_share=traits.rotary_share,
    )
    _refuse_contradictions(shape, sized=head_size is not None)
    return shape


def _refuse_contradictions(shape: ModelShape, *, sized: bool) -> None:
    own = sized and shape.head_size * shape.heads != shape.hidden
    if own and not shape.traits.sized_heads:
        raise UserMistake(
            f"head_size ({shape.head_size}) is not supported by the family {shape.family}, whose heads are hidden / "
            f"heads wide: omit head_size, or use {listed([name for name, one in FAMILIES.items() if one.sized_heads])}."
        )
    if shape.hidden % shape.heads:
        raise UserMistake(
            f"hidden ({shape.hidden}) is not divisible by {shape.heads} heads: make hidden a multiple of heads."
        )
    if not shape.traits.grouped and shape.kv_heads != shape.heads:
        raise UserMistake(
            f"kv_heads ({shape.kv_heads}) is not supported by the family {shape.family}, which has no grouped-query "
            f"attention: omit kv_heads, or use {listed([name for name, one in FAMILIES.items() if one.grouped])}."
        )
    if shape.heads % shape.kv_heads:
        raise UserMistake(
            f"{shape.heads} heads are not divisible by {shape.kv_heads} kv_heads: make heads a multiple of kv_heads."
        )
    if shape.traits.head_transform and not shape.tied:
        raise UserMistake(
            f"{shape.family} with tied: false has an unused bias that gets no gradient: leave tied at true."
        )
    if not shape.traits.rotary:
        return
    if shape.head_size % 2:
        raise UserMistake(
            f"The head dimension is {shape.head_size}"
            f"{'' if own else f' (hidden {shape.hidden} / heads {shape.heads})'}, but rotary "
            f"embeddings need an even one: choose other sizes."
        )
    if int(shape.head_size * shape.rotary_share) < 1:
        raise UserMistake(
            f"The family {shape.family} applies rotary embeddings to {shape.rotary_share:.0%} of each head, and of a "
            f"head dimension of {shape.head_size} that is none: choose fewer heads or a larger hidden."
        )


def find_shape(name: str) -> ModelShape:
    """The published shape called `name`, in any case."""
    try:
        return NAMED[name.strip().lower()]
    except KeyError:
        raise UserMistake(
            f"No model shape is called '{name}'.{suggestion(name, NAMED)} "
            "Explicit sizes work too; docs/models.md has the names."
        ) from None
