"""Exports a run as a LitGPT checkpoint: lit_model.pth, model_config.yaml and the tokenizer, as `litgpt.py` reads it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import SliceReader
from shoal.checkpoint.state import MODEL
from shoal.convert.export import refuse_adapter
from shoal.convert.litgpt import CONFIG_FILE, NAMES, NEOX, Heads, heads_of, read_settings
from shoal.convert.shards import DTYPES, check_dtype, check_output, temporary_folder
from shoal.convert.state_dicts import LITGPT_FILE
from shoal.mistakes import UserMistake
from shoal.models.names import tensors_for_files
from shoal.models.prepare import prepare_model, read_blueprint

# Of a transformers config: where it comes from, what it does not compute with, and what is elsewhere in LitGPT.
IRRELEVANT = frozenset(
    {"architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "use_cache", "initializer_range"}
    | {"bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp", "classifier_dropout", "return_dict"}
    | {"hidden_dropout", "attention_dropout", "max_window_layers", "sliding_window", "layer_types", "is_decoder"}
    | {"id2label", "label2id", "problem_type", "output_attentions", "output_hidden_states", "chunk_size_feed_forward"}
)


def export_litgpt(
    run: Path,
    output: Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    report: Callable[[str], None] = lambda _: None,
) -> Path:
    """Export the weights of a run's checkpoint (the newest, or that of `step`) as a folder that LitGPT loads.

    LitGPT has one file for all weights, so all of them are in memory at once.
    """
    check_dtype(dtype, "export")
    refuse_adapter(run)
    source = choose_checkpoint(run, step).path
    description = run / "model"
    if not (description / "config.json").is_file():
        raise UserMistake(f"{run} is not a shoal run: it has no model/config.json.")
    plan = read_blueprint(description)
    config = model_config(plan.settings, run.name)
    check_output(output)
    with temporary_folder(output, description.iterdir()) as part:
        (part / CONFIG_FILE).write_text(yaml.safe_dump(config, sort_keys=False))
        _refuse_differences(part / CONFIG_FILE, plan.settings)
        reader = SliceReader(source)
        model = prepare_model(plan).model
        tensors: dict[str, Tensor] = {}
        for name in dict(model.named_parameters()):
            one = reader.read_whole(MODEL + name)
            tensors[name] = one if dtype is None else one.to(DTYPES[dtype])
        state = litgpt_tensors(tensors_for_files(model, tensors), plan.settings)
        report(f"{LITGPT_FILE}: {len(state)} tensors")
        torch.save({"model": state}, part / LITGPT_FILE)
    return output


def model_config(settings: Any, name: str) -> dict[str, Any]:
    """LitGPT's model config of a transformers model."""
    kind = settings.model_type
    if kind not in NAMES:
        raise UserMistake(f"The run's model is a {kind}, and LitGPT's format is written for {', '.join(NAMES)} only.")
    heads = heads_of(settings)
    neox = NAMES[kind] is NEOX
    config: dict[str, Any] = {
        # LitGPT computes differently for names with Gemma or OLMo in them.
        "name": f"Mistral-{name}"
        if kind == "mistral"
        else f"shoal-{name.replace('Gemma', 'gemma').replace('OLMo', 'olmo')}",
        "hf_config": {},
        "block_size": settings.max_position_embeddings,
        "vocab_size": settings.vocab_size,
        "padded_vocab_size": settings.vocab_size,
        "n_layer": settings.num_hidden_layers,
        "n_embd": settings.hidden_size,
        "n_head": heads.heads,
        "n_query_groups": heads.groups,
        "head_size": heads.size,
        "intermediate_size": settings.intermediate_size,
        **_rope(settings.rope_parameters),
    }
    if neox:
        return config | {
            "norm_class_name": "LayerNorm",
            "norm_eps": settings.layer_norm_eps,
            "mlp_class_name": "GptNeoxMLP",
            "gelu_approximate": "none" if settings.hidden_act == "gelu" else "tanh",
            "parallel_residual": settings.use_parallel_residual,
            "bias": True,
            "rotary_percentage": settings.rope_parameters.get("partial_rotary_factor", 1.0),
        }
    return config | {
        "norm_class_name": "RMSNorm",
        "norm_eps": settings.rms_norm_eps,
        "mlp_class_name": "LLaMAMLP",
        "parallel_residual": False,
        "bias": bool(getattr(settings, "mlp_bias", False)),
        "attn_bias": kind == "qwen2" or bool(getattr(settings, "attention_bias", False)),
        "norm_qk": kind == "qwen3",
        "rotary_percentage": 1.0,
        **_window(settings),
    }


def _window(settings: Any) -> dict[str, Any]:
    window = getattr(settings, "sliding_window", None)
    used = getattr(settings, "use_sliding_window", settings.model_type == "mistral")
    return {"sliding_window_size": window} if window is not None and used else {}


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    base = float(rope["rope_theta"])
    found: dict[str, Any] = {"rope_base": int(base) if base == int(base) else base}
    if rope.get("rope_type") == "linear":
        return found | {"rope_adjustments": {"factor": float(rope["factor"])}}
    if rope.get("rope_type") == "llama3":
        names = {"factor": "factor", "low_freq_factor": "low_freq_factor", "high_freq_factor": "high_freq_factor"}
        adjusted = {theirs: rope[ours] for theirs, ours in names.items()}
        return found | {
            "rope_adjustments": adjusted | {"original_max_seq_len": rope["original_max_position_embeddings"]}
        }
    return found


def _refuse_differences(file: Path, settings: Any) -> None:
    """Read the config back as an import does: what comes out must be the same model."""
    tokens = {key: getattr(settings, key, None) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    back = read_settings(file, tied=settings.tie_word_embeddings, tokens=tokens).to_dict()
    before = settings.to_dict()
    for key in before.keys() | back.keys():
        if key in IRRELEVANT or before.get(key) == back.get(key):
            continue
        if key in ("rope_parameters",) and _numbers(before[key]) == _numbers(back.get(key) or {}):
            continue
        raise UserMistake(
            f"The run's model has {key}: {before.get(key)}, which LitGPT's config cannot "
            "express; export it with --to hf."
        )


def _numbers(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Without values that are the default: a whole rotation, and no scaling."""
    default = {"partial_rotary_factor": 1.0, "rope_type": "default"}
    return {key: value for key, value in rope.items() if value is not None and default.get(key) != value}


def litgpt_tensors(tensors: Mapping[str, Tensor], settings: Any) -> dict[str, Tensor]:
    """Transformers' tensors, under their names in files, in LitGPT's layout since version 0.5.5."""
    names = NAMES[settings.model_type]
    heads = heads_of(settings)
    around = {theirs: ours for ours, theirs in names.around.items()}
    inside = {theirs: ours for ours, theirs in names.inside.items()}
    found: dict[str, Tensor] = {}
    fused: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if module in around:
            found[f"{around[module]}.{kind}"] = tensor
            continue
        layer, _, rest = module.removeprefix(f"{names.blocks}.").partition(".")
        prefix = f"transformer.h.{layer}"
        if rest in inside:
            found[f"{prefix}.{inside[rest]}.{kind}"] = tensor
        elif rest == "attention.query_key_value":
            found[f"{prefix}.attn.qkv.{kind}"] = _sorted_by_kind(tensor, heads)
        elif rest in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            fused.setdefault(f"{prefix}.attn.qkv.{kind}", {})[rest[-6]] = tensor
        else:
            raise UserMistake(f"The run's model has {name}, for which LitGPT has no place; export it with --to hf.")
    found |= {name: torch.cat([parts[letter] for letter in "qkv"]) for name, parts in fused.items()}
    # LitGPT always stores both.
    found.setdefault("lm_head.weight", found["transformer.wte.weight"].clone())
    return {name: one.contiguous() for name, one in found.items()}


def _sorted_by_kind(fused: Tensor, heads: Heads) -> Tensor:
    """GPT-NeoX has query, key and value of each head together; LitGPT all queries, then keys, then values."""
    rest = fused.shape[1:]
    return fused.reshape(heads.heads, 3, heads.size, *rest).transpose(0, 1).reshape(-1, *rest)
