"""Translates LitGPT models to transformers: the architecture of a model_config.yaml, and the names of its tensors.

LitGPT has one model class with many options. Combinations that match a transformers class are translated; any other
option value that changes the computation is refused by name. LitGPT fuses query, key and value in one tensor. Since
version 0.5.5 it is `attn.qkv`: all queries, then keys, then values. Before, it was `attn.attn`, where each query group
is followed by its key and value, as in GPT-NeoX.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

import shoal.offline  # noqa: F401
from shoal.mistakes import UserMistake
from shoal.models.stored import Concatenated, Sliced, Stored
from shoal.models.tensor_slices import TensorSlice

CONFIG_FILE = "model_config.yaml"
# LitGPT's defaults for keys that are not in the file.
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
# Options that no supported architecture has, with the values that disable them.
OFF: dict[str, tuple[Any, ...]] = {
    "norm_1": (True,),
    "norm_2": (True,),
    "norm_qk_type": ("default",),
    "sliding_window_layer_placing": (None, "all", 1),
    "sliding_window_layer_stride": (None, 1),
    "routed_scaling_factor": (1, None),
}
# Keys that describe the model's origin, or matter only for options that are refused.
IGNORED = frozenset({"name", "hf_config", "vocab_size", "padding_multiple", "sliding_window_indices"})


@dataclass(frozen=True)
class Heads:
    """The layout of the rows of a fused QKV weight."""

    heads: int
    groups: int
    size: int

    @property
    def rows(self) -> int:
        return (self.heads + 2 * self.groups) * self.size


@dataclass(frozen=True)
class Names:
    """Transformers' names of LitGPT's modules."""

    around: Mapping[str, str]  # embedding, final norm and head
    blocks: str  # prefix of the layer index
    inside: Mapping[str, str]  # modules of a decoder layer


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
    """Return the transformers config of the model in a model_config.yaml; `tokens` holds the special token ids."""
    try:
        read = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError):
        read = None
    if not isinstance(read, dict):
        raise UserMistake(f"{path} is not a valid LitGPT model config; copy it again, or give --model.")
    config = DEFAULTS | read
    try:
        return _settings(path, config, tied, tokens)
    except UserMistake:
        raise
    except Exception as error:  # a value of a wrong type; each config class validates in its own way
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserMistake(f"{path} is not a config that transformers accepts: {reason}") from None


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
        if key in UNDERSTOOD | IGNORED:
            continue
        if value not in OFF[key] if key in OFF else value:
            raise _unknown(path, f"{key}: {value}")
    for key in SIZES:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise UserMistake(
                f"{path} has {key}: {config.get(key)}, which must be a positive integer; fix it or give --model."
            )
    if config["n_head"] % (config.get("n_query_groups") or config["n_head"]):
        raise UserMistake(
            f"{path} has n_head {config['n_head']}, which is not divisible by n_query_groups "
            f"{config['n_query_groups']}; fix it or give --model."
        )
    scalar = config.get("attention_scores_scalar")
    if scalar not in (None, config.get("head_size") or config["n_embd"] // config["n_head"]):
        raise _unknown(path, f"attention_scores_scalar: {scalar}")
    # LitGPT itself checks the name here: Gemma's norms add 1 to their weights, and OLMo's norms have no weights.
    for name in ("Gemma", "OLMo"):
        if name in str(config.get("name", "")):
            raise _unknown(path, f"name: {config['name']}")


def _unknown(path: Path, what: str) -> UserMistake:
    return UserMistake(
        f"{path} has {what}, which is not supported (shoal converts Llama, Mistral, Qwen2, Qwen3 and GPT-NeoX); "
        "convert it with litgpt convert_from_litgpt, and import its model.pth with --model."
    )


def _architecture(path: Path, config: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the `model_type` with the same computation, and the settings specific to it."""
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
        _require(path, config, wanted)
        return "gpt_neox", {
            "layer_norm_eps": float(config["norm_eps"]),
            "hidden_act": "gelu" if config["gelu_approximate"] == "none" else "gelu_pytorch_tanh",
            "use_parallel_residual": config["parallel_residual"],
            "rope_parameters": {"partial_rotary_factor": config["rotary_percentage"]},
            "hidden_dropout": 0.0,
        }
    if kind != ("RMSNorm", "LLaMAMLP"):
        raise _unknown(path, f"norm_class_name: {kind[0]} with mlp_class_name: {kind[1]}")
    _require(path, config, {"parallel_residual": False, "rotary_percentage": 1})
    if config.get("norm_qk"):
        _require(path, config, {"bias": False, "attn_bias": (None, False), "sliding_window_size": None})
        return "qwen3", {"use_sliding_window": False}
    if window is not None or str(config.get("name", "")).startswith("Mistral"):
        _require(path, config, {"bias": False, "attn_bias": (None, False)})
        return "mistral", {"sliding_window": window}
    if config.get("attn_bias") and not config["bias"]:
        return "qwen2", {"use_sliding_window": False}
    return "llama", {"attention_bias": config["bias"], "mlp_bias": config["bias"]}


def _require(path: Path, config: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key, value in wanted.items():
        if config.get(key) not in (value if isinstance(value, tuple) else (value,)):
            kind = f"norm_class_name: {config['norm_class_name']}"
            raise _unknown(path, f"{key}: {config.get(key)} with {kind}")


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


def heads_of(settings: Any) -> Heads:
    """The heads of a transformers config."""
    count = settings.num_attention_heads
    size = getattr(settings, "head_dim", None) or settings.hidden_size // count
    return Heads(count, getattr(settings, "num_key_value_heads", None) or count, size)


def renamed(path: Path, tensors: Mapping[str, Stored], settings: Any) -> dict[str, Stored]:
    """Return LitGPT's `tensors` under transformers' names for a model of `settings`. No values are read yet."""
    names = NAMES.get(settings.model_type)
    if names is None:
        raise UserMistake(
            f"{path} is a LitGPT checkpoint, which shoal converts to {', '.join(NAMES)}, not to the "
            f"{settings.model_type} of --model."
        )
    heads = heads_of(settings)
    found: dict[str, Stored] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if "lora_" in name:
            raise UserMistake(f"{path} holds the LoRA weight {name}; merge it first, with litgpt merge_lora.")
        block = re.fullmatch(r"transformer\.h\.(\d+)\.(.+)", module)
        if block is None and module in names.around:
            found[f"{names.around[module]}.{kind}"] = tensor
        elif block is not None and block[2] in names.inside:
            found[f"{names.blocks}.{block[1]}.{names.inside[block[2]]}.{kind}"] = tensor
        elif block is not None and block[2] in ("attn.qkv", "attn.attn"):
            if tensor.shape[0] != heads.rows:
                raise UserMistake(
                    f"{path} holds {name} with {tensor.shape[0]} rows, but {heads.heads} heads and {heads.groups} "
                    f"query groups of size {heads.size} need {heads.rows}: it belongs to another config."
                )
            groups = _groups(tensor, heads, mixed=block[2] == "attn.attn")
            prefix = f"{names.blocks}.{block[1]}"
            if names is NEOX:
                found[f"{prefix}.attention.query_key_value.{kind}"] = Concatenated(
                    [one for some in groups for one in some], 0
                )
            else:
                for letter, alike in zip("qkv", zip(*groups, strict=True), strict=True):
                    found[f"{prefix}.self_attn.{letter}_proj.{kind}"] = Concatenated(alike, 0)
        else:
            raise UserMistake(
                f"{path} holds {name}, which is not a tensor of LitGPT's {settings.model_type} models; "
                "merge adapters first, or convert it with litgpt convert_from_litgpt."
            )
    return found


def _groups(fused: Stored, heads: Heads, *, mixed: bool) -> list[tuple[Stored, Stored, Stored]]:
    """Return the queries, key and value of each query group; `mixed`: the groups are interleaved."""
    queries = heads.heads // heads.groups * heads.size

    def rows(start: int, count: int) -> Stored:
        inner = fused.shape[1:]
        return Sliced(fused, TensorSlice((start, *(0 for _ in inner)), (count, *inner)))

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
