"""LitGPT's models in transformers' terms: the architecture that a model_config.yaml describes, and names of tensors.

LitGPT has one model class with many switches. What transformers has a class for is translated; any switch that would
make the model compute something else is refused by name. Query, key and value are one tensor in LitGPT: since
version 0.5.5 `attn.qkv`, all queries first, then keys, then values; before that `attn.attn`, in which each group of
queries is followed by its own key and value, as in GPT-NeoX.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import shoal.offline  # noqa: F401
from shoal.mistakes import UserMistake
from shoal.models.stored import Cut, Joined, Stored
from shoal.models.tensor_slices import TensorSlice

CONFIG_FILE = "model_config.yaml"
# What LitGPT takes where the file says nothing.
DEFAULTS: dict[str, Any] = {
    "norm_class_name": "LayerNorm",
    "mlp_class_name": "GptNeoxMLP",
    "parallel_residual": True,
    "bias": True,
    "norm_eps": 1e-5,
    "rotary_percentage": 0.25,
    "rope_base": 10_000,
    "rope_condense_ratio": 1,
    "gelu_approximate": "none",
}
SIZES = ("n_layer", "n_embd", "n_head", "block_size", "padded_vocab_size")
UNDERSTOOD = frozenset(
    {*DEFAULTS, *SIZES, "n_query_groups", "head_size", "intermediate_size", "attn_bias", "norm_qk"}
    | {"rope_adjustments", "sliding_window_size", "attention_scores_scalar"}
)
# Switches that no class translated to here has, with the values that leave them off.
OFF: dict[str, tuple[Any, ...]] = {
    "norm_1": (True,),
    "norm_2": (True,),
    "norm_qk_type": ("default",),
    "sliding_window_layer_placing": (None, "all", 1),
    "sliding_window_layer_stride": (None, 1),
    "routed_scaling_factor": (1, None),
}
# These say where the model comes from, or matter only to switches that are refused.
BESIDE_THE_POINT = frozenset({"name", "hf_config", "vocab_size", "padding_multiple", "sliding_window_indices"})


@dataclass(frozen=True)
class Heads:
    """How the rows of a fused query, key and value are divided."""

    heads: int
    groups: int
    size: int

    @property
    def rows(self) -> int:
        return (self.heads + 2 * self.groups) * self.size


@dataclass(frozen=True)
class Names:
    """What transformers' files call LitGPT's modules."""

    around: Mapping[str, str]
    blocks: str  # before the number of a block
    inside: Mapping[str, str]


GATED = Names(
    around={"transformer.wte": "model.embed_tokens", "transformer.ln_f": "model.norm", "lm_head": "lm_head"},
    blocks="model.layers",
    inside={
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attn.proj": "self_attn.o_proj",
        "attn.norm_q": "self_attn.q_norm",
        "attn.norm_k": "self_attn.k_norm",
        "mlp.fc_1": "mlp.gate_proj",
        "mlp.fc_2": "mlp.up_proj",
        "mlp.proj": "mlp.down_proj",
    },
)
NEOX = Names(
    around={
        "transformer.wte": "gpt_neox.embed_in",
        "transformer.ln_f": "gpt_neox.final_layer_norm",
        "lm_head": "embed_out",
    },
    blocks="gpt_neox.layers",
    inside={
        "norm_1": "input_layernorm",
        "norm_2": "post_attention_layernorm",
        "attn.proj": "attention.dense",
        "mlp.fc": "mlp.dense_h_to_4h",
        "mlp.proj": "mlp.dense_4h_to_h",
    },
)
NAMES = {"llama": GATED, "mistral": GATED, "qwen2": GATED, "qwen3": GATED, "gpt_neox": NEOX}


def read_settings(path: Path, *, tied: bool, tokens: Mapping[str, Any]) -> Any:
    """The transformers config of the model that a model_config.yaml describes; `tokens` are the ids of special ones."""
    try:
        said = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        said = None
    if not isinstance(said, dict):
        raise UserMistake(f"{path} cannot be read as LitGPT's description of a model; copy it again, or give --model.")
    config = DEFAULTS | said
    try:
        return _settings(path, config, tied, tokens)
    except UserMistake:
        raise
    except Exception as error:  # a value of a wrong kind; and each config class checks in its own way what it is given
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserMistake(f"{path} describes no model that transformers accepts: {reason}") from None


def _settings(path: Path, config: Mapping[str, Any], tied: bool, tokens: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    _refuse_unknown(path, config)
    model_type, special = _architecture(path, config)
    heads = config["n_head"]
    size = config.get("head_size") or config["n_embd"] // heads
    common = {
        "vocab_size": config["padded_vocab_size"],
        "hidden_size": config["n_embd"],
        "num_hidden_layers": config["n_layer"],
        "num_attention_heads": heads,
        "intermediate_size": config.get("intermediate_size") or 4 * config["n_embd"],
        "max_position_embeddings": config["block_size"],
        "rope_parameters": _rope(path, config) | special.pop("rope_parameters", {}),
        "tie_word_embeddings": tied,
        "attention_dropout": 0.0,
        **{key: tokens.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }
    if model_type != "gpt_neox":
        groups = config.get("n_query_groups") or heads
        common |= {"num_key_value_heads": groups, "head_dim": size, "rms_norm_eps": float(config["norm_eps"])}
    return AutoConfig.for_model(model_type, **common, **special)


def _refuse_unknown(path: Path, config: Mapping[str, Any]) -> None:
    for key, value in config.items():
        if key in UNDERSTOOD | BESIDE_THE_POINT:
            continue
        if value not in OFF[key] if key in OFF else value:
            raise _unknown(path, f"{key}: {value}")
    for key in SIZES:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise UserMistake(f"{path} gives {key} as {config.get(key)}, where a number is needed; or give --model.")
    if config["n_head"] % (config.get("n_query_groups") or config["n_head"]):
        raise UserMistake(f"{path} gives n_head {config['n_head']} and n_query_groups {config['n_query_groups']}.")
    scalar = config.get("attention_scores_scalar")
    if scalar not in (None, config.get("head_size") or config["n_embd"] // config["n_head"]):
        raise _unknown(path, f"attention_scores_scalar: {scalar}")
    # LitGPT goes by the name here: Gemma's norms add one to their weights, and OLMo's have none.
    for name in ("Gemma", "OLMo"):
        if name in str(config.get("name", "")):
            raise _unknown(path, f"name: {config['name']}")


def _unknown(path: Path, what: str) -> UserMistake:
    return UserMistake(
        f"{path} has {what}, for which shoal knows no transformers architecture (it knows those of Llama, Mistral, "
        "Qwen2, Qwen3 and GPT-NeoX); convert it with litgpt convert_from_litgpt, and import its model.pth with --model."
    )


def _architecture(path: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The `model_type` that computes the same, and the settings that it alone has."""
    kind = (config["norm_class_name"], config["mlp_class_name"])
    window = config.get("sliding_window_size")
    if window is not None and 0 in (config.get("sliding_window_indices") or [])[: config["n_layer"]]:
        raise _unknown(path, "sliding_window_indices with zeros")
    if kind == ("LayerNorm", "GptNeoxMLP"):
        wanted = {
            "bias": True,
            "n_query_groups": (None, config["n_head"]),
            "head_size": (None, config["n_embd"] / config["n_head"]),
            "norm_qk": (None, False),
            "sliding_window_size": None,
        }
        _demand(path, config, wanted)
        return "gpt_neox", {
            "layer_norm_eps": float(config["norm_eps"]),
            "hidden_act": "gelu" if config["gelu_approximate"] == "none" else "gelu_pytorch_tanh",
            "use_parallel_residual": config["parallel_residual"],
            "rope_parameters": {"partial_rotary_factor": config["rotary_percentage"]},
            "hidden_dropout": 0.0,
        }
    if kind != ("RMSNorm", "LLaMAMLP"):
        raise _unknown(path, f"norm_class_name: {kind[0]} with mlp_class_name: {kind[1]}")
    _demand(path, config, {"parallel_residual": False, "rotary_percentage": 1})
    if config.get("norm_qk"):
        _demand(path, config, {"bias": False, "attn_bias": (None, False), "sliding_window_size": None})
        return "qwen3", {"use_sliding_window": False}
    if window is not None or str(config.get("name", "")).startswith("Mistral"):
        _demand(path, config, {"bias": False, "attn_bias": (None, False)})
        return "mistral", {"sliding_window": window}
    if config.get("attn_bias") and not config["bias"]:
        return "qwen2", {"use_sliding_window": False}
    return "llama", {"attention_bias": config["bias"], "mlp_bias": config["bias"]}


def _demand(path: Path, config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if config.get(key) not in (value if isinstance(value, tuple) else (value,)):
            kind = f"norm_class_name: {config['norm_class_name']}"
            raise _unknown(path, f"{key}: {config.get(key)} beside {kind}")


def _rope(path: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config["rope_base"])}
    ratio, adjustments = config["rope_condense_ratio"], config.get("rope_adjustments")
    if not adjustments:
        return settings if ratio == 1 else {**settings, "rope_type": "linear", "factor": float(ratio)}
    llama3 = {"factor", "low_freq_factor", "high_freq_factor", "original_max_seq_len"}
    if ratio != 1 or not isinstance(adjustments, dict) or adjustments.keys() not in ({"factor"}, llama3):
        raise _unknown(path, f"rope_adjustments: {adjustments}")
    stretched = {**settings, "rope_type": "linear", **{key: float(value) for key, value in adjustments.items()}}
    if "original_max_seq_len" in stretched:
        stretched["rope_type"] = "llama3"
        stretched["original_max_position_embeddings"] = int(stretched.pop("original_max_seq_len"))
    return stretched


def renamed(path: Path, tensors: Mapping[str, Stored], settings: Any) -> dict[str, Stored]:
    """LitGPT's `tensors` as transformers' files would have them for a model of `settings`; nothing is read yet."""
    names = NAMES.get(settings.model_type)
    if names is None:
        raise UserMistake(
            f"{path} holds LitGPT's tensors, which shoal can rename for {', '.join(NAMES)}, not for the "
            f"{settings.model_type} of --model."
        )
    count = settings.num_attention_heads
    size = getattr(settings, "head_dim", None) or settings.hidden_size // count
    heads = Heads(count, getattr(settings, "num_key_value_heads", None) or count, size)
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if "lora_" in name:
            raise UserMistake(f"{path} holds LoRA's {name}; merge it first, with litgpt merge_lora.")
        block = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module)
        if block is None and module in names.around:
            found[f"{names.around[module]}.{kind}"] = tensor
        elif block is not None and block[2] in names.inside:
            found[f"{names.blocks}.{block[1]}.{names.inside[block[2]]}.{kind}"] = tensor
        elif block is not None and block[2] in ("attn.qkv", "attn.attn"):
            if tensor.shape[0] != heads.rows:
                raise UserMistake(
                    f"{path} holds {name} with {tensor.shape[0]} rows, but {heads.heads} heads and {heads.groups} "
                    f"groups of {heads.size} channels make {heads.rows}: it belongs to another config."
                )
            groups = _groups(tensor, heads, mixed=block[2] == "attn.attn")
            prefix = f"{names.blocks}.{block[1]}"
            if names is NEOX:
                found[f"{prefix}.attention.query_key_value.{kind}"] = Joined(
                    [one for some in groups for one in some], 0
                )
            else:
                for letter, alike in zip("qkv", zip(*groups, strict=True), strict=True):
                    found[f"{prefix}.self_attn.{letter}_proj.{kind}"] = Joined(alike, 0)
        else:
            raise UserMistake(
                f"{path} holds {name}, which shoal does not know from LitGPT's {settings.model_type} models; "
                "merge adapters first, or convert it with litgpt convert_from_litgpt."
            )
    return found


def _groups(fused: Stored, heads: Heads, *, mixed: bool) -> list[tuple[Stored, Stored, Stored]]:
    """The queries, the key and the value of each group; `mixed` where a group's lie together."""
    queries = heads.heads // heads.groups * heads.size

    def rows(start: int, count: int) -> Stored:
        inner = fused.shape[1:]
        return Cut(fused, TensorSlice((start, *(0 for _ in inner)), (count, *inner)))

    found = []
    for group in range(heads.groups):
        if mixed:
            start = group * (queries + 2 * heads.size)
            starts = (start, start + queries, start + queries + heads.size)
        else:
            keys = heads.heads * heads.size + group * heads.size
            starts = (group * queries, keys, keys + heads.groups * heads.size)
        found.append((rows(starts[0], queries), rows(starts[1], heads.size), rows(starts[2], heads.size)))
    return found
