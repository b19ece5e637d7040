"""The share of a model's parameters that are trained, by their transformers names: all that `model.freeze` leaves, or
with an adapter those of `adapter.train_also`."""

from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatch

from shoal.catalogue.shapes import ModelShape, block_vectors, embedding_parameters, head_parameters
from shoal.plan.run.blocks import linears
from shoal.plan.run.run import FROZEN, Trained


def unfrozen_shares(shape: ModelShape, patterns: Sequence[str]) -> Trained:
    """The trainable shares after freezing every parameter that matches a pattern."""
    if not patterns:
        return Trained()
    return _shares(shape, lambda name: not any(fnmatch(name, pattern) for pattern in patterns))


def also_trained_shares(shape: ModelShape, patterns: Sequence[str]) -> Trained:
    """The shares of the base that are trained beside an adapter: parameters or modules that match a pattern."""
    if not patterns:
        return FROZEN
    return _shares(shape, lambda name: any(_matches(name, pattern) for pattern in patterns), adapted=True)


def _shares(shape: ModelShape, is_trained: Callable[[str], bool], *, adapted: bool = False) -> Trained:
    free: dict[str, float] = {"embedding": 0.0, "blocks": 0.0, "head": 0.0}
    whole = dict(free)
    first = shape.layers  # the first block with a trained parameter
    for part, block, name, size in _parameters(shape):
        whole[part] += size
        # A pattern of `train_also` may name a tied weight as the head.
        as_head = adapted and shape.tied and part == "embedding" and is_trained(shape.traits.names.head)
        if is_trained(name) or as_head:
            free[part] += size
            first = min(first, block)
    shares = {part: free[part] / whole[part] if whole[part] else float(not adapted) for part in whole}
    # Adapters are in every block.
    below = 0.0 if adapted or free["embedding"] else first / shape.layers
    return Trained(**shares, below=below)


def _matches(name: str, pattern: str) -> bool:
    """As in `models.adapters`: a pattern of a parameter, of a module, or the last part of a module's name."""
    module = name.rpartition(".")[0]
    return fnmatch(name, pattern) or fnmatch(module, pattern) or module.rpartition(".")[2] == pattern


def _parameters(shape: ModelShape) -> Iterator[tuple[str, int, str, float]]:
    """(part of the model, block, name, size) of every matrix, and of the rest of each block together."""
    names = shape.traits.names
    yield "embedding", 0, names.embedding, embedding_parameters(shape)
    for index in range(shape.layers):
        for one in linears(shape):
            yield "blocks", index, names.weight(one.name, index), one.parameters
        yield "blocks", index, f"{names.block.format(index)}norm.weight", block_vectors(shape)
    if head_parameters(shape):
        yield "head", shape.layers, names.head, head_parameters(shape)
