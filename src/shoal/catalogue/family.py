"""What a model family is described by: its traits, its names and its tensor and pipeline parallel plan."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Plan:
    """The tensor and pipeline parallel plan: which matrices are column-parallel and row-parallel.

    Module names relative to a block; those in `positions` and `entry` relative to the backbone.
    """

    norms: tuple[str, ...]  # the norms before attention and before the MLP
    column: tuple[str, ...]  # split along their outputs: heads or intermediate size
    row: tuple[str, ...]  # split along their inputs
    # Column-parallel matrices that are this many matrices, concatenated.
    fused: dict[str, int] = field(default_factory=dict, hash=False)
    positions: str | None = None  # a learned position embedding
    entry: tuple[str, ...] = ()  # applied to the embeddings before the first block


@dataclass(frozen=True)
class Names:
    """Parameters and linear layers by the names that patterns and adapters use."""

    embedding: str
    block: str  # with {} for its index
    head: str
    # In forward order: those of attention, of which the first may compute queries, keys and values; those of the MLP.
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    # The submodules that hold them. Without, patterns cannot select a submodule in the forecast.
    attention_in: str = ""
    mlp_in: str = ""

    def weight(self, linear: str, block: int) -> str:
        """The name of a linear layer's weight in the model."""
        submodule = self.attention_in if linear in self.attention else self.mlp_in
        return f"{self.block.format(block)}{submodule}{linear}.weight"


@dataclass(frozen=True)
class Family:
    """Properties that all models of an architecture share."""

    model_type: str  # in a transformers config
    names: Names
    plan: Plan | None = None  # None: neither tensor nor pipeline parallelism
    buildable: bool = True  # false: only for comparing the forecast with published results
    models: str | None = None  # published under this name
    gated: bool = False  # gated MLP: three matrices instead of two
    rotary: bool = False
    learned_positions: bool = False
    transposed: bool = False  # linear layers are Conv1D, which stores its matrix transposed
    linear_bias: bool = False  # on every linear layer of a block
    qkv_bias: bool = False  # on query, key and value, where the other linear layers have none
    biased: tuple[str, ...] = ()  # the linear layers with a bias, where these are others
    rms_norm: bool = False  # several kernels in transformers; LayerNorm is one kernel in PyTorch
    norm_bias: bool = False  # LayerNorm with an offset; elsewhere a norm is one scale per channel
    head_norms: bool = False  # per-head norms of queries and keys
    embedding_norm: bool = False  # between the embedding and the first block
    shared_norm: bool = False  # attention and MLP usually read the same norm, so that a block has one
    grouped: bool = False  # may have fewer key-value heads than heads
    sized_heads: bool = False  # the size of a head may be another than hidden divided by heads
    final_norm: bool = True  # between the last block and the head
    post_norm: bool = False  # a norm of the residual stream after attention and MLP, not of what these read
    head_transform: bool = False  # the head is more than one matrix: it has a linear layer and a norm of its own
    head_bias: bool = False  # on lm_head
    parallel_residual: bool = False  # attention and MLP may read the same input
    unfused_gelu: bool = False  # the activation function is several elementwise kernels
    unfused_erf: bool = False  # the same, of the definition of GELU
    saves_activation: bool = False  # the activation function saves what it returns, not what it reads
    recomputed_gelu: bool = False  # such kernels in a function that saves their input only
    hidden_dropout: bool = False  # has dropout on the hidden states, by default 0
    causal: bool = True
    biased_attention: bool = False  # ALiBi
    upcasts_softmax: bool = False  # of materialized scores to fp32, as the families with rotary embeddings do too
    segments: int = 0  # rows of BERT's token-type table
    spare_positions: int = 0  # rows of the position embedding that no token has
    # Defaults for explicit sizes, and for a transformers config that does not say.
    tied: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0

    @property
    def fused_qkv(self) -> bool:
        """Whether one linear layer computes queries, keys and values."""
        return len(self.names.attention) == 2


LLAMA_NAMES = Names(
    embedding="model.embed_tokens.weight",
    block="model.layers.{}.",
    head="lm_head.weight",
    attention=("q_proj", "k_proj", "v_proj", "o_proj"),
    attention_in="self_attn.",
    mlp=("gate_proj", "up_proj", "down_proj"),
    mlp_in="mlp.",
)
