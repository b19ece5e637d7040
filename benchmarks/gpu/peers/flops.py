"""Model FLOPs utilisation, counted in one way for everyone."""

from dataclasses import dataclass

from peers.cases import Case
from peers.task import ADAPTER_RANK
from shoal.catalogue.gpus import recognise
from shoal.catalogue.named_shapes import ModelShape
from shoal.catalogue.shapes import block_matrices, find_shape, shape_from_sizes


@dataclass(frozen=True)
class Work:
    """Operations for a token, and the formula in numbers."""

    per_token: float
    formula: str

    def utilisation(self, tokens_per_second: float, peak: float) -> float:
        return tokens_per_second * self.per_token / peak


def count_work(case: Case) -> Work:
    """Six operations for each trained entry of a matrix and token: two forward, two for the gradient of the input, two
    for its own. A frozen one has no gradient of its own. Looking up an embedding multiplies nothing; the head does,
    tied or not. Attention is counted without its causal half, as in published tables. Recomputing counts for nothing.
    """
    shape = find_shape(case.shape) if isinstance(case.shape, str) else shape_from_sizes(**case.shape)
    matrices = shape.layers * block_matrices(shape) + shape.vocab * shape.hidden
    attention = 12 * shape.layers * shape.hidden * case.length
    tail = f"12 · {shape.layers} layers · {shape.hidden} hidden · {case.length} tokens"
    if case.adapter:
        trained = adapter_parameters(shape)
        return Work(
            4 * matrices + 6 * trained + attention, f"4 · {matrices:,} frozen + 6 · {trained:,} trained + {tail}"
        )
    return Work(6 * matrices + attention, f"6 · {matrices:,} matrix parameters + {tail}")


def adapter_parameters(shape: ModelShape) -> int:
    """Of LoRA on queries and values."""
    return shape.layers * ADAPTER_RANK * (2 * shape.hidden + shape.query_width + shape.kv_width)


def peak_of(gpu: str | None) -> float | None:
    """bf16 operations a second that the maker promises, in float8 cases too, so that their gain shows."""
    known = recognise(gpu) if gpu else None
    return known.bf16 if known else None
