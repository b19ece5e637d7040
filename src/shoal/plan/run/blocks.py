"""The linear layers of one transformer block by name: their sizes, inputs and tensor-parallel sharding."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shoal.catalogue.optimizers import orthogonalized_together
from shoal.catalogue.shapes import ModelShape, attention_matrices, block_vectors

# What the layers of an MLP read.
MLP = ("second norm", "inner")


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

    def of_one_expert(self, degree: int, routed: int) -> tuple[float, float]:
        """`local_sizes` of one of the `routed` experts of a token, of which a layer of an MLP has the width of all."""
        inputs, outputs = self.local_sizes(degree)
        return (inputs / routed, outputs) if self.row else (inputs, outputs / routed)

    def local_sizes(self, degree: int) -> tuple[float, float]:
        """(inputs, outputs) on a tensor-parallel rank."""
        return (self.inputs / degree, self.outputs) if self.row else (self.inputs, self.outputs / degree)


@lru_cache(maxsize=256)
def linears(shape: ModelShape, *, joined: bool = False) -> tuple[Linear, ...]:
    """The linear layers in forward order; `joined`: query, key and value as one."""
    hidden, ffn, names = shape.hidden, shape.ffn, shape.traits.names
    *inward, (last, width, _) = attention_matrices(shape)
    if joined and shape.latent is None:
        inward = [("attn" if len(inward) > 1 else inward[0][0], hidden, sum(outputs for _, _, outputs in inward))]
    # Of latent attention, the second of each pair of projections reads the first one's output.
    attention = [
        Linear(name, inputs, outputs, reads="norm" if inputs == hidden else f"{name} input")
        for name, inputs, outputs in inward
    ]
    return (
        *attention,
        Linear(last, width, hidden, row=True, reads="attention"),
        *(Linear(name, hidden, ffn, reads="second norm") for name in names.mlp[:-1]),
        Linear(names.mlp[-1], ffn, hidden, row=True, reads="inner"),
    )


def orthogonalized(shape: ModelShape) -> Iterator[tuple[tuple[int, int], int, int]]:
    """For each shape of the blocks' matrices: its short and its long side, how many there are, and how many of them
    Muon orthogonalizes at once."""
    sizes = Counter((one.inputs, one.outputs) for one in linears(shape))
    for (inputs, outputs), count in sizes.items():
        short, long = sorted((inputs, outputs))
        count *= shape.layers
        yield (short, long), count, min(count, orthogonalized_together(inputs * outputs))


def expert_parameters(shape: ModelShape) -> int:
    """Parameters of a block's inactive experts. Other families have a few further vectors instead."""
    return shape.others if shape.others > shape.hidden * shape.hidden else 0


@lru_cache(maxsize=256)
def block_parameters(shape: ModelShape, tensor_parallel: int = 1) -> float:
    """Parameters of one block on a tensor-parallel rank: matrices, also of inactive experts, are sharded, norms and
    biases replicated."""
    matrices = sum(one.parameters for one in linears(shape)) + shape.others
    return matrices / tensor_parallel + block_vectors(shape) - shape.others


def biased_outputs(shape: ModelShape, tp: int) -> float:
    """Elements per token of a block's linear layers that have biases, on a tensor-parallel rank."""
    if shape.traits.linear_bias:
        return sum(one.local_sizes(tp)[1] for one in linears(shape))
    if shape.traits.biased:
        return sum(one.local_sizes(tp)[1] for one in linears(shape) if one.name in shape.traits.biased)
    return (shape.query_width + 2 * shape.kv_width) / tp if shape.traits.qkv_bias else 0.0
