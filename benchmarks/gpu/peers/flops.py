"""Model FLOPs utilization (MFU), computed the same way for every tool."""

from dataclasses import dataclass

from peers.cases import Case
from peers.task import ADAPTER_RANK
from shoal.catalogue.gpus import recognize
from shoal.catalogue.model_shape import ModelShape
from shoal.catalogue.shapes import block_matrices, find_shape, shape_from_sizes


@dataclass(frozen=True)
class Flops:
    """FLOPs per token, and the formula with its values."""

    per_token: float
    formula: str

    def mfu(self, tokens_per_second: float, peak: float) -> float:
        return tokens_per_second * self.per_token / peak


def count_flops(case: Case) -> Flops:
    """Six FLOPs per token and matrix parameter: two in the forward pass, two for the gradient of the input, two for the
    gradient of the weight, which a frozen weight does not have. The embedding lookup is not counted; the head is, tied
    or not. Attention is counted without the causal mask, as in published tables. Recomputation is not counted.
    """
    shape = find_shape(case.shape) if isinstance(case.shape, str) else shape_from_sizes(**case.shape)
    matrices = shape.layers * block_matrices(shape) + shape.vocab * shape.hidden
    attention = 12 * shape.layers * shape.hidden * case.length
    tail = f"12 · {shape.layers} layers · {shape.hidden} hidden · {case.length} tokens"
    if case.adapter:
        trained = adapter_parameters(shape)
        return Flops(
            4 * matrices + 6 * trained + attention, f"4 · {matrices:,} frozen + 6 · {trained:,} trained + {tail}"
        )
    return Flops(6 * matrices + attention, f"6 · {matrices:,} matrix parameters + {tail}")


def adapter_parameters(shape: ModelShape) -> int:
    """Parameters of LoRA on queries and values."""
    return shape.layers * ADAPTER_RANK * (2 * shape.hidden + shape.query_width + shape.kv_width)


def peak_of(gpu: str | None) -> float | None:
    """The datasheet's bf16 FLOP/s, for float8 cases too, so that their MFU shows the gain."""
    known = recognize(gpu) if gpu else None
    return known.bf16 if known else None
