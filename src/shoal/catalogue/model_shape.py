"""The sizes of a model: what a shape consists of."""

from dataclasses import dataclass

from shoal.catalogue.families import FAMILIES
from shoal.catalogue.family import Family


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's scaling of the rotary frequencies for sequences longer than in pretraining."""

    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclass(frozen=True)
class LatentAttention:
    """DeepSeek's attention: queries, and keys with values, are projected down to a vector of low rank and up again."""

    query_rank: int  # 0: queries are one matrix
    kv_rank: int
    plain: int  # channels of each head's queries and keys without rotary positions
    rotated: int  # and with them; all heads share those of the keys
    value: int  # channels of each head's values

    @property
    def head_size(self) -> int:
        """The mean of the channels of keys and values: what attention computes with."""
        return (self.plain + self.rotated + self.value) // 2


@dataclass(frozen=True)
class ModelShape:
    """All sizes of a model. `head_size` 0 means hidden divided by heads, and is replaced by it."""

    family: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int
    tied: bool
    head_size: int = 0
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0  # of each head's channels, the first ones
    rope_scaling: RopeScaling | None = None
    parallel_residual: bool = True  # attention and MLP read the same input, in families that can
    shared_norm: bool | None = None  # the same norm of it, of which a block has no second; None: as the family
    sliding_window: int | None = None
    sliding_share: float = 1.0  # of the blocks: the others attend to the whole sequence
    initializer_range: float = 0.02
    others: int = 0  # further parameters per block, such as inactive experts
    outside: int = 0  # and outside blocks, less than 0 if the embedding is narrower than the model
    routed: int = 0  # experts that a token is routed to, each of their share of `ffn`
    experts: int = 0  # of which there are as many
    latent: LatentAttention | None = None  # in place of the matrices that the heads' sizes imply
    # None if no tokenizer is known yet: building the model takes them from the tokenizer.
    bos: int | None = None
    eos: int | None = None
    model_type: str = ""  # in transformers, if it is not that of the family

    def __post_init__(self) -> None:
        if not self.model_type:
            object.__setattr__(self, "model_type", FAMILIES[self.family].model_type)
        if not self.head_size:
            object.__setattr__(self, "head_size", self.hidden // self.heads)
        if self.shared_norm is None:
            object.__setattr__(self, "shared_norm", self.traits.shared_norm)

    @property
    def is_family(self) -> bool:
        """Whether it is exactly of its family: others are only forecast, as one of the family with further parts."""
        return self.model_type == self.traits.model_type

    @property
    def traits(self) -> Family:
        """The traits of the family: gating, biases, norms and positions."""
        return FAMILIES[self.family]

    @property
    def query_width(self) -> int:
        """Channels of all query heads together; differs from `hidden` where the head size is set by hand."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Channels of all key heads together; the values have as many."""
        return self.kv_heads * self.head_size

    def attended(self, length: int) -> float:
        """Keys per query of a sequence, averaged over blocks, where a causal mask is not counted: fewer than `length`
        in blocks with a sliding window."""
        within = min(length, self.sliding_window or length)
        return self.sliding_share * within + (1 - self.sliding_share) * length


def experts(
    hidden: int,
    width: int,
    count: int,
    active: int,
    *,
    shared: int = 0,
    layers: int = 1,
    dense_layers: int = 0,
    dense_width: int = 0,
) -> tuple[int, int]:
    """(width of the MLP that one token passes through, further parameters per block) of a mixture of experts.

    Each expert has three matrices; a router chooses `active` of `count`, and `shared` is the width of those that every
    token passes through. In `dense_layers` there is an MLP of `dense_width` instead.
    """
    everything = (layers - dense_layers) * hidden * (3 * (count * width + shared) + count)
    everything += dense_layers * hidden * 3 * dense_width
    # Not more than there is, if most layers have an MLP that is narrower than the active experts.
    ffn = min(active * width + shared, everything // (layers * hidden * 3))
    return ffn, everything // layers - hidden * 3 * ffn
