"""Small models of every family for the tests of this folder."""

from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from shoal.catalogue.shapes import shape_from_sizes
from shoal.config.schema import ModelConfig
from shoal.models.anatomy import read_anatomy
from shoal.models.families import transformers_config
from shoal.models.prepare import Blueprint, blueprint, prepare_model
from shoal.models.weights import Weights, materialize

CPU = torch.device("cpu")
HIDDEN, LAYERS, FFN, VOCAB, POSITIONS = 32, 2, 48, 96, 64
GROUPED = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = (*GROUPED, "neox", "gpt2", "bert")
EXPERTS = 5  # divisible by no number of ranks
COMPRESSED = {  # DeepSeek's attention, and its first block without experts
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": EXPERTS,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": EXPERTS},
    "qwen2_moe": {"num_experts": EXPERTS, "shared_expert_intermediate_size": 40},
    "qwen3_moe": {"num_experts": EXPERTS, "mlp_only_layers": [0]},
    "olmoe": {"num_experts": EXPERTS},
    "gpt_oss": {"num_local_experts": EXPERTS},
    "deepseek_v2": COMPRESSED,
    "deepseek_v3": COMPRESSED,
}


def small_config(family: str, *, tied: bool = True) -> Any:
    """Four heads of dimension eight, and two key-value heads where the family supports it."""
    shape = shape_from_sizes(
        family,
        hidden=HIDDEN,
        layers=LAYERS,
        heads=4,
        kv_heads=2 if family in GROUPED else None,
        ffn=FFN,
        vocab=VOCAB,
        positions=POSITIONS,
        tied=tied or family == "bert",  # an untied BERT is refused
    )
    return transformers_config(shape)


def mixture_config(family: str, **changes: Any) -> Any:
    """A mixture-of-experts config of a transformers model type."""
    return CONFIG_MAPPING[family](
        **{
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "moe_intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "num_experts_per_tok": 2,
            "vocab_size": VOCAB,
            "max_position_embeddings": POSITIONS,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **MIXTURES.get(family, {}),
            **changes,
        }
    )


def on_meta(settings: Any, *, attention: str = "auto", longest: int = POSITIONS) -> Any:
    return prepare_model(Blueprint(settings, None), attention=attention, longest=longest).model


def drawn(settings: Any, *, seed: int = 0, **options: Any) -> Any:
    """A model with random weights, initialized by shoal."""
    model = on_meta(settings, **options)
    materialize(model, read_anatomy(model), device=CPU, dtype=torch.float32, source=Weights(None, seed))
    return model


def loaded(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a Hugging Face folder, as a run with model.from loads it."""
    plan = blueprint(ModelConfig.model_validate({"from": str(folder)}))
    model = prepare_model(plan, longest=POSITIONS).model
    materialize(model, read_anatomy(model), device=CPU, dtype=dtype, source=Weights(plan.folder, 0))
    return model


def plain(settings: Any, seed: int = 0) -> Any:
    """A model built by transformers alone."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(settings)


def tokens(sequences: int = 2, length: int = 24, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, VOCAB, (sequences, length), generator=torch.Generator().manual_seed(seed))
