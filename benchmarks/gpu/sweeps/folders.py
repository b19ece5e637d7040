"""Model types that are trained from a folder alone: their config.json, and random weights for it.

The sizes are those of the published models, except for the mixture of experts, which is a smaller Qwen3.
"""

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

FOLDERS: dict[str, dict[str, Any]] = {
    "gemma3-270m": {
        "model_type": "gemma3_text", "hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 2048, "sliding_window": 512,
        "vocab_size": 262_144, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    },
    "gemma3-1b": {
        "model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "intermediate_size": 6912, "sliding_window": 512,
        "vocab_size": 262_144, "max_position_embeddings": 32_768, "tie_word_embeddings": True,
    },
    "olmo2-1b": {
        "model_type": "olmo2", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 16, "intermediate_size": 8192, "vocab_size": 100_352,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "phi3-mini": {
        "model_type": "phi3", "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32_064,
        "max_position_embeddings": 4096, "sliding_window": 2047, "tie_word_embeddings": False,
    },
    "smollm3-3b": {
        "model_type": "smollm3", "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "intermediate_size": 11_008, "vocab_size": 128_256,
        "max_position_embeddings": 65_536, "tie_word_embeddings": True,
    },
    "starcoder2-3b": {
        "model_type": "starcoder2", "hidden_size": 3072, "num_hidden_layers": 30, "num_attention_heads": 24,
        "num_key_value_heads": 2, "intermediate_size": 12_288, "vocab_size": 49_152, "hidden_act": "gelu_pytorch_tanh",
        "max_position_embeddings": 16_384, "sliding_window": 4096, "tie_word_embeddings": True, "use_bias": True,
        "residual_dropout": 0.1, "embedding_dropout": 0.1, "attention_dropout": 0.1, "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "qwen3-moe-1.5b": {
        "model_type": "qwen3_moe", "hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 3072, "moe_intermediate_size": 768,
        "num_experts": 32, "num_experts_per_tok": 4, "vocab_size": 32_000, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "norm_topk_prob": True,
    },
}  # fmt: skip
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
TINY_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}


@cache
def described(name: str) -> Path:
    """A folder with the model's config.json and no weights: enough for the forecast."""
    return write_settings(name, Path(tempfile.mkdtemp(prefix="model-")))


def write_settings(name: str, folder: Path, *, tiny: bool = False) -> Path:
    settings = dict(FOLDERS[name])
    if tiny:
        settings |= TINY | (TINY_EXPERTS if "num_experts" in settings else {})
    (folder / "config.json").write_text(json.dumps(settings, indent=1))
    return folder


def with_weights(name: str, folder: Path, *, tiny: bool = False) -> Path:
    """The same with random weights, made once."""
    if folder.exists():
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    config = AutoConfig.from_pretrained(write_settings(name, folder, tiny=tiny))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
