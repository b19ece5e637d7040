"""The model families: their traits, their names in transformers, and their tensor and pipeline parallel plans.

Data and lookups only. A model of another architecture can be trained with every strategy but tensor, context and
pipeline parallelism; `models/anatomy.py` finds its parts.
"""

from dataclasses import dataclass, field

from shoal.mistakes import UserMistake


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
    rms_norm: bool = False  # several kernels in transformers; LayerNorm is one kernel in PyTorch
    norm_bias: bool = False  # LayerNorm with an offset; elsewhere a norm is one scale per channel
    head_norms: bool = False  # per-head norms of queries and keys
    embedding_norm: bool = False  # between the embedding and the first block
    grouped: bool = False  # may have fewer key-value heads than heads
    final_norm: bool = True  # between the last block and the head
    post_norm: bool = False  # a norm of the residual stream after attention and MLP, not of what these read
    head_transform: bool = False  # the head is more than one matrix: it has a linear layer and a norm of its own
    parallel_residual: bool = False  # attention and MLP may read the same input
    unfused_gelu: bool = False  # the activation function is several elementwise kernels
    hidden_dropout: bool = False  # has dropout on the hidden states, by default 0
    causal: bool = True
    biased_attention: bool = False  # ALiBi
    segments: int = 0  # rows of BERT's token-type table
    # Defaults for explicit sizes, and for a transformers config that does not say.
    tied: bool = False
    norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    rotary_share: float = 1.0

    @property
    def fused_qkv(self) -> bool:
        """Whether one linear layer computes queries, keys and values."""
        return len(self.names.attention) == 2


# What transformers' configs call dropout on the attention weights, on the hidden states, and elsewhere.
ATTENTION_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
HIDDEN_DROPOUT = (
    "resid_pdrop", "hidden_dropout", "hidden_dropout_prob", "resid_dropout", "residual_dropout", "dropout",
)  # fmt: skip
OTHER_DROPOUT = ("embd_pdrop", "emb_pdrop", "embedding_dropout", "activation_dropout", "ffn_dropout")

LLAMA_NAMES = Names(
    embedding="model.embed_tokens.weight",
    block="model.layers.{}.",
    head="lm_head.weight",
    attention=("q_proj", "k_proj", "v_proj", "o_proj"),
    attention_in="self_attn.",
    mlp=("gate_proj", "up_proj", "down_proj"),
    mlp_in="mlp.",
)
LLAMA_PLAN = Plan(
    norms=("input_layernorm", "post_attention_layernorm"),
    column=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
    row=("self_attn.o_proj", "mlp.down_proj"),
)

FAMILIES: dict[str, Family] = {
    "llama": Family("llama", LLAMA_NAMES, LLAMA_PLAN, gated=True, rotary=True, rms_norm=True, grouped=True),
    "mistral": Family("mistral", LLAMA_NAMES, LLAMA_PLAN, gated=True, rotary=True, rms_norm=True, grouped=True),
    "qwen2": Family(
        "qwen2",
        LLAMA_NAMES,
        LLAMA_PLAN,
        gated=True,
        rotary=True,
        rms_norm=True,
        grouped=True,
        qkv_bias=True,
        norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "qwen3": Family(
        "qwen3",
        LLAMA_NAMES,
        LLAMA_PLAN,
        gated=True,
        rotary=True,
        rms_norm=True,
        grouped=True,
        head_norms=True,
        norm_eps=1e-6,
        rope_theta=1e6,
    ),
    "neox": Family(
        "gpt_neox",
        Names(
            embedding="gpt_neox.embed_in.weight",
            block="gpt_neox.layers.{}.",
            head="lm_head.weight",
            attention=("query_key_value", "dense"),
            mlp=("dense_h_to_4h", "dense_4h_to_h"),
        ),
        # The fused matrix holds q, k and v head by head, so that the shard of a rank is one span.
        Plan(
            norms=("input_layernorm", "post_attention_layernorm"),
            column=("attention.query_key_value", "mlp.dense_h_to_4h"),
            row=("attention.dense", "mlp.dense_4h_to_h"),
            entry=("emb_dropout",),
        ),
        models="Pythia",
        rotary=True,
        hidden_dropout=True,
        linear_bias=True,
        norm_bias=True,
        parallel_residual=True,
        rotary_share=0.25,
    ),
    "gpt2": Family(
        "gpt2",
        Names(
            embedding="transformer.wte.weight",
            block="transformer.h.{}.",
            head="lm_head.weight",
            attention=("c_attn", "attn.c_proj"),
            mlp=("c_fc", "mlp.c_proj"),
        ),
        Plan(
            norms=("ln_1", "ln_2"),
            column=("attn.c_attn", "mlp.c_fc"),
            row=("attn.c_proj", "mlp.c_proj"),
            fused={"attn.c_attn": 3},
            positions="wpe",
            entry=("drop",),
        ),
        transposed=True,
        learned_positions=True,
        hidden_dropout=True,
        linear_bias=True,
        norm_bias=True,
        unfused_gelu=True,
        tied=True,
    ),
    # BERT norms after the residual sum, so that its last block's own norm is the final one.
    "bert": Family(
        "bert",
        Names(
            embedding="bert.embeddings.word_embeddings.weight",
            block="bert.encoder.layer.{}.",
            head="cls.predictions.decoder.weight",
            attention=("query", "key", "value", "attention.output.dense"),
            mlp=("intermediate.dense", "output.dense"),
        ),
        learned_positions=True,
        hidden_dropout=True,
        linear_bias=True,
        norm_bias=True,
        embedding_norm=True,
        final_norm=False,
        post_norm=True,
        head_transform=True,
        causal=False,
        segments=2,
        tied=True,
        norm_eps=1e-12,
    ),
    # Grouped keys without a gated MLP.
    "starcoder2": Family(
        "starcoder2",
        Names(
            embedding="model.embed_tokens.weight",
            block="model.layers.{}.",
            head="lm_head.weight",
            attention=("q_proj", "k_proj", "v_proj", "o_proj"),
            attention_in="self_attn.",
            mlp=("c_fc", "c_proj"),
            mlp_in="mlp.",
        ),
        buildable=False,
        rotary=True,
        linear_bias=True,
        norm_bias=True,
        grouped=True,
        tied=True,
    ),
    "nemotron": Family(
        "nemotron",
        Names(
            embedding="model.embed_tokens.weight",
            block="model.layers.{}.",
            head="lm_head.weight",
            attention=("q_proj", "k_proj", "v_proj", "o_proj"),
            attention_in="self_attn.",
            mlp=("up_proj", "down_proj"),
            mlp_in="mlp.",
        ),
        buildable=False,
        rotary=True,
        norm_bias=True,
        grouped=True,
        rotary_share=0.5,
    ),
    "mpt": Family(
        "mpt",
        Names(
            embedding="transformer.wte.weight",
            block="transformer.blocks.{}.",
            head="lm_head.weight",
            attention=("Wqkv", "out_proj"),
            mlp=("up_proj", "down_proj"),
        ),
        buildable=False,
        biased_attention=True,
        tied=True,
    ),
}

BUILDABLE = tuple(name for name, family in FAMILIES.items() if family.buildable)
# By transformers' model_type: the name of the family, and its plan if it has one.
BY_MODEL_TYPE = {family.model_type: name for name, family in FAMILIES.items()}
PLANS = {family.model_type: family.plan for family in FAMILIES.values() if family.plan is not None}


def find_plan(model_type: str, key: str) -> Plan:
    """The plan for a transformers `model_type`. Raises a UserMistake that lists those which `key` (parallel.tp, …)
    supports."""
    plan = PLANS.get(model_type)
    if plan is None:
        raise UserMistake(
            f"{key} supports {', '.join(PLANS)}, and this model is {model_type}; "
            f"use {key} 1 and parallel.strategy fsdp, which shards any model."
        )
    return plan


def listed(names: list[str]) -> str:
    """`names` as in a sentence: a, b or c."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
