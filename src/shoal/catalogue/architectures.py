"""Architectures of transformers that are one of our families with other parts: more norms, experts, latent attention.

They can be forecast from a config.json alone. `tests/catalogue/test_architectures.py` compares their parameter counts
with transformers' own.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shoal.catalogue.model_shape import LatentAttention, experts

# What configs call the number of experts, and of those that a token is routed to.
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k")


@dataclass(frozen=True)
class Architecture:
    """How a model differs from the family that it is forecast as."""

    family: str = "llama"
    norms: int = 2  # of the hidden size, in each block
    # Norms of queries and keys, each head's or of all heads together, that the family does not have.
    head_norms: Literal["none", "each", "all"] = "none"
    tied: bool = False  # the default of its config
    joined: bool = False  # one linear layer computes queries, keys and values
    output_norms: bool = False  # norms of what attention and MLP return, not of what they read


# By transformers' model_type.
ARCHITECTURES: dict[str, Architecture] = {
    "gemma": Architecture(tied=True),
    "gemma2": Architecture(norms=4, tied=True),
    "gemma3_text": Architecture(norms=4, head_norms="each", tied=True),
    "phi3": Architecture(joined=True),
    "granite": Architecture(),
    "olmo2": Architecture(head_norms="all", output_norms=True),
    "olmo3": Architecture(head_norms="all", output_norms=True),
    "smollm3": Architecture(tied=True),
    "mixtral": Architecture(),
    "qwen2_moe": Architecture(family="qwen2"),
    "qwen3_moe": Architecture(family="qwen3"),
    "olmoe": Architecture(head_norms="all"),
    "deepseek_v2": Architecture(),
    "deepseek_v3": Architecture(),
    "internlm": Architecture(),
    # Encoders that have RoBERTa's layers and its head.
    "camembert": Architecture(family="roberta", tied=True),
    "xlm-roberta": Architecture(family="roberta", tied=True),
}
# A multimodal config whose text model has another type, where it does not say which.
TEXT_TYPES = {"gemma3": "gemma3_text"}
# What transformers takes for keys that a config.json of a type leaves out (configuration_gemma3.py and others): those
# of Gemma 3 name only what differs.
CONFIG_DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 131_072,
    },
    "gemma2": {
        "head_dim": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 2,
        "max_position_embeddings": 8192,
    },
    "qwen3": {"head_dim": 128, "max_position_embeddings": 32_768},
}


@dataclass(frozen=True)
class Parts:
    """What the sizes that all configs have do not say."""

    ffn: int  # of the MLP, or of the experts that a token passes through together
    others: int  # further parameters per block
    latent: LatentAttention | None = None
    routed: int = 0  # experts that a token is routed to
    experts: int = 0  # of so many


def parts(
    settings: Mapping[str, Any],
    architecture: Architecture,
    *,
    hidden: int,
    layers: int,
    query_width: int,
    kv_width: int,
    head_size: int,
    ffn: int,
) -> Parts:
    """The parts of a model from its config; sizes that are not integers raise a TypeError or ValueError."""
    others = (architecture.norms - 2) * hidden
    if architecture.head_norms != "none":
        others += 2 * head_size if architecture.head_norms == "each" else query_width + kv_width
    count = first_of(settings, EXPERTS)
    if count:
        width = int(settings.get("moe_intermediate_size") or settings.get("intermediate_size") or ffn)
        shared = int(settings.get("shared_expert_intermediate_size") or 0)
        gate = hidden if shared else 0
        shared = shared or width * int(settings.get("n_shared_experts") or 0)
        active, inactive = experts(
            hidden,
            width,
            int(count),
            int(first_of(settings, ACTIVE) or 1),
            shared=shared,
            layers=layers,
            dense_layers=_dense_layers(settings, layers),
            dense_width=ffn,
        )
        routed = int(first_of(settings, ACTIVE) or 1)
        return Parts(active, others + inactive + gate, _latent(settings), routed, int(count))
    return Parts(ffn, others, _latent(settings))


def architecture_of(model_type: str) -> Architecture:
    """How a model of this type differs from its family; one that is not listed does not."""
    return ARCHITECTURES.get(model_type, Architecture())


def first_of(settings: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    """The value of the first of these names that is set."""
    return next((settings[name] for name in names if settings.get(name)), None)


def _dense_layers(settings: Mapping[str, Any], layers: int) -> int:
    """Layers with an MLP instead of experts."""
    first = settings.get("first_k_dense_replace")
    if first is not None:
        return min(layers, int(first))
    step = int(settings.get("decoder_sparse_step") or 1)
    without = set(settings.get("mlp_only_layers") or ())
    return sum(1 for layer in range(layers) if layer in without or (layer + 1) % step)


def _latent(settings: Mapping[str, Any]) -> LatentAttention | None:
    if not settings.get("kv_lora_rank"):
        return None
    return LatentAttention(
        query_rank=int(settings.get("q_lora_rank") or 0),
        kv_rank=int(settings["kv_lora_rank"]),
        plain=int(settings["qk_nope_head_dim"]),
        rotated=int(settings["qk_rope_head_dim"]),
        value=int(settings["v_head_dim"]),
    )
