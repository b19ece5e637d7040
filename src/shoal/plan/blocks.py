"""The matrices of one transformer block, by name: what is multiplied, what may be adapted, what is cut by whom."""

from dataclasses import dataclass
from functools import lru_cache

from shoal.catalogue.shapes import ModelShape, block_vectors


@dataclass(frozen=True)
class Linear:
    """A matrix of a block. `row`: tensor parallelism cuts its inputs, not its outputs."""

    name: str
    inputs: int
    outputs: int
    row: bool = False
    # Which tensor it reads: linears that read one keep it once.
    reads: str = ""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs

    def cut(self, degree: int) -> tuple[float, float]:
        """(inputs, outputs) on a tensor-parallel rank."""
        return (self.inputs / degree, self.outputs) if self.row else (self.inputs, self.outputs / degree)


_FUSED = {
    "neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    "mpt": ("Wqkv", "out_proj", "up_proj", "down_proj"),
}


def joins_queries(shape: ModelShape) -> bool:
    """Whether one matrix makes queries, keys and values."""
    return shape.family in _FUSED


def writes_norms_out(shape: ModelShape) -> bool:
    """Whether the family's norm is RMSNorm, which transformers writes out; LayerNorm is one kernel of PyTorch's."""
    return not shape.traits.norm_bias and shape.family != "mpt"


@lru_cache(maxsize=256)
def linears(shape: ModelShape, *, joined: bool = False) -> tuple[Linear, ...]:
    """The matrices in the order in which the forward pass meets them; `joined`: query, key and value as one."""
    hidden, query, keys, ffn = shape.hidden, shape.query_width, shape.kv_width, shape.ffn
    if shape.family in _FUSED:
        first, second, third, fourth = _FUSED[shape.family]
        return (
            Linear(first, hidden, query + 2 * keys, reads="norm"),
            Linear(second, query, hidden, row=True, reads="attention"),
            Linear(third, hidden, ffn, reads="second norm"),
            Linear(fourth, ffn, hidden, row=True, reads="inner"),
        )
    bert = shape.family == "bert"
    names = ("query", "key", "value", "attention.output.dense") if bert else ("q_proj", "k_proj", "v_proj", "o_proj")
    attention: tuple[Linear, ...] = (
        Linear(names[0], hidden, query, reads="norm"),
        Linear(names[1], hidden, keys, reads="norm"),
        Linear(names[2], hidden, keys, reads="norm"),
        Linear(names[3], query, hidden, row=True, reads="attention"),
    )
    if joined:
        attention = (Linear("attn", hidden, query + 2 * keys, reads="norm"), attention[-1])
    if not shape.traits.gated:
        return (
            *attention,
            Linear("intermediate.dense", hidden, ffn, reads="second norm"),
            Linear("output.dense", ffn, hidden, row=True, reads="inner"),
        )
    return (
        *attention,
        Linear("gate_proj", hidden, ffn, reads="second norm"),
        Linear("up_proj", hidden, ffn, reads="second norm"),
        Linear("down_proj", ffn, hidden, row=True, reads="inner"),
    )


@lru_cache(maxsize=256)
def block_parameters(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Parameters of one block on a tensor-parallel rank: matrices are cut, norms and biases nearly not."""
    matrices = sum(one.parameters for one in linears(shape))
    return matrices / tensor_parallel + block_vectors(shape)
