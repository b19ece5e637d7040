"""The share of a model's parameters that `model.freeze` leaves trainable, or that `adapter.train_also` trains beside
the adapters, by their transformers names."""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatch

from shoal.catalogue.shapes import ModelShape, block_vectors, embedding_parameters, head_parameters
from shoal.plan.blocks import linears
from shoal.plan.run import Trained


def trained_shares(shape: ModelShape, patterns: Sequence[str]) -> Trained:
    """The trainable shares after freezing every parameter that matches a pattern."""
    matched = _matched(shape, patterns)
    return Trained(**{part: 1.0 - share for part, share in matched.items()})


def trained_beside_adapters(shape: ModelShape, patterns: Sequence[str]) -> Trained:
    """The shares of parameters that match a pattern."""
    return Trained(**_matched(shape, patterns))


def _matched(shape: ModelShape, patterns: Sequence[str]) -> dict[str, float]:
    """The share of each part of the model whose parameters match a pattern."""
    found: dict[str, float] = {"embedding": 0.0, "blocks": 0.0, "head": 0.0}
    whole = dict(found)
    for part, name, size in _parameters(shape):
        whole[part] += size
        if any(fnmatch(name, pattern) for pattern in patterns):
            found[part] += size
    return {part: found[part] / whole[part] if whole[part] else 0.0 for part in whole}


def _parameters(shape: ModelShape) -> Iterator[tuple[str, str, float]]:
    """(part of the model, name, size) of every matrix, and of the rest of each block together."""
    names = shape.traits.names
    yield "embedding", names.embedding, embedding_parameters(shape)
    for index in range(shape.layers):
        for one in linears(shape):
            yield "blocks", names.weight(one.name, index), one.parameters
        yield "blocks", f"{names.block.format(index)}norm.weight", block_vectors(shape)
    if head_parameters(shape):
        yield "head", names.head, head_parameters(shape)
