"""Models of the types that are only forecast, as transformers builds them on the meta device."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

from shoal.catalogue.causal_models import ALWAYS_ENCODERS, ENCODERS
from shoal.catalogue.shapes import ModelShape

# Of types whose config has other names for the sizes than Llama's.
GPT_SIZES = {"hidden": "n_embd", "layers": "n_layer", "heads": "n_head", "ffn": "n_inner", "positions": "n_positions"}
SIZES = {
    "hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "ffn": "intermediate_size", "positions": "max_position_embeddings",
}  # fmt: skip
NAMES: dict[str, dict[str, str]] = {
    "bloom": {"hidden": "hidden_size", "layers": "n_layer", "heads": "n_head"},
    "distilbert": {
        "hidden": "dim", "layers": "n_layers", "heads": "n_heads", "ffn": "hidden_dim",
        "positions": "max_position_embeddings",
    },
    "falcon": {**SIZES, "kv_heads": "num_kv_heads", "ffn": "ffn_hidden_size"},
    "gpt2": GPT_SIZES,
    "gpt_bigcode": GPT_SIZES,
    "gpt_neo": {
        "hidden": "hidden_size", "layers": "num_layers", "heads": "num_heads", "ffn": "intermediate_size",
        "positions": "max_position_embeddings",
    },
    "gptj": GPT_SIZES,
    "opt": {**SIZES, "ffn": "ffn_dim"},
}  # fmt: skip
MODEL_TYPES = {"neox": "gpt_neox"}
# Types that transformers does not build, as one with the same matrices, norms and biases.
ALIKE = {"baichuan": "llama", "internlm2": "llama", "qwen": "qwen2"}


def config_of(shape: ModelShape) -> Any:
    """The transformers config of a shape of these types."""
    kind = ALIKE.get(shape.model_type, shape.model_type)
    settings = {name: getattr(shape, field) for field, name in NAMES.get(kind, SIZES).items()}
    settings |= {"vocab_size": shape.vocab, "tie_word_embeddings": shape.tied}
    if kind in ("gemma", "llama", "mistral", "nemotron", "qwen2"):
        settings["head_dim"] = shape.head_size
    if kind == "falcon":
        settings["new_decoder_architecture"] = not shape.shared_norm
    if kind == "gpt_neo":
        settings["attention_types"] = [[["global", "local"], shape.layers // 2]]
    if kind == "opt":
        settings["word_embed_proj_dim"] = shape.hidden
    if kind == "esm":
        settings |= {"position_embedding_type": "rotary", "pad_token_id": 1, "mask_token_id": 32}
    if kind in ("roberta", "xlm-roberta"):
        settings["type_vocab_size"] = 1
    return AutoConfig.for_model(kind, **settings)


def built(config: Any) -> Any:
    """The model with this config as a language model, on the meta device."""
    encoder = config.model_type in (*ENCODERS, *ALWAYS_ENCODERS)
    with torch.device("meta"):
        return (AutoModelForMaskedLM if encoder else AutoModelForCausalLM).from_config(config)


def counted(config: Any) -> int:
    return sum(one.numel() for one in built(config).parameters())
