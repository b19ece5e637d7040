"""The linear layers of one transformer block by name: their sizes, inputs and tensor-parallel sharding."""

from dataclasses import dataclass
from functools import lru_cache

from shoal.catalogue.shapes import ModelShape, block_vectors


@dataclass(frozen=True)
class Linear:
    """A linear layer of a block. `row`: row-wise tensor parallelism, which shards its inputs and not its outputs."""

    name: str
    inputs: int
    outputs: int
    row: bool = False
    # The tensor it reads: layers that share an input save it once.
    reads: str = ""

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs

    def local_sizes(self, degree: int) -> tuple[float, float]:
        """(inputs, outputs) on a tensor-parallel rank."""
        return (self.inputs / degree, self.outputs) if self.row else (self.inputs, self.outputs / degree)


_FUSED = {
    "neox": ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    "gpt2": ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj"),
    "mpt": ("Wqkv", "out_proj", "up_proj", "down_proj"),
}


def has_fused_qkv(shape: ModelShape) -> bool:
    """Whether one linear layer computes queries, keys and values."""
    return shape.family in _FUSED


def has_rms_norm(shape: ModelShape) -> bool:
    """Whether the norm is RMSNorm, several kernels in transformers; LayerNorm is one kernel in PyTorch."""
    return not shape.traits.norm_bias and shape.family != "mpt"


@lru_cache(maxsize=256)
def linears(shape: ModelShape, *, joined: bool = False) -> tuple[Linear, ...]:
    """The linear layers in forward order; `joined`: query, key and value as one."""
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
    """Parameters of one block on a tensor-parallel rank: matrices are sharded, norms and biases replicated."""
    matrices = sum(one.parameters for one in linears(shape))
    return matrices / tensor_parallel + block_vectors(shape)
