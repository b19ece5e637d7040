"""The share of a model's parameters that `model.freeze` leaves trainable, by their transformers names."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from shoal.catalogue.shapes import ModelShape, block_vectors, embedding_parameters, head_parameters
from shoal.plan.blocks import linears
from shoal.plan.run import Trained

# Per family: the names of the embedding, a block and the head; below, the submodules of a block's linear layers.
_NAMES = {
    "llama": ("model.embed_tokens.weight", "model.layers.{}.", "lm_head.weight"),
    "neox": ("gpt_neox.embed_in.weight", "gpt_neox.layers.{}.", "embed_out.weight"),
    "gpt2": ("transformer.wte.weight", "transformer.h.{}.", "lm_head.weight"),
    "bert": ("bert.embeddings.word_embeddings.weight", "bert.encoder.layer.{}.", "cls.predictions.decoder.weight"),
    "mpt": ("transformer.wte.weight", "transformer.blocks.{}.", "lm_head.weight"),
}
_SUBMODULES = {"q_proj": "self_attn.", "k_proj": "self_attn.", "v_proj": "self_attn.", "o_proj": "self_attn."}
_SUBMODULES |= {"gate_proj": "mlp.", "up_proj": "mlp.", "down_proj": "mlp."}


def trained_shares(shape: ModelShape, patterns: Sequence[str]) -> Trained:
    """The trainable shares after freezing every parameter that matches a pattern."""
    if not patterns:
        return Trained()
    free: dict[str, float] = {"embedding": 0.0, "blocks": 0.0, "head": 0.0}
    whole = dict(free)
    for part, name, size in _parameters(shape):
        whole[part] += size
        if not any(fnmatch(name, pattern) for pattern in patterns):
            free[part] += size
    shares = {part: free[part] / whole[part] if whole[part] else 1.0 for part in whole}
    return Trained(**shares)


def _parameters(shape: ModelShape) -> Iterator[tuple[str, str, float]]:
    """(part of the model, name, size) of every matrix, and of the rest of each block together."""
    family = shape.family if shape.family in _NAMES else "llama"
    embedding, block, head = _NAMES[family]
    yield "embedding", embedding, embedding_parameters(shape)
    for index in range(shape.layers):
        for one in linears(shape):
            submodule = _SUBMODULES.get(one.name, "")
            yield "blocks", f"{block.format(index)}{submodule}{one.name}.weight", one.parameters
        yield "blocks", f"{block.format(index)}norm.weight", block_vectors(shape)
    if head_parameters(shape):
        yield "head", head, head_parameters(shape)
