"""One small Llama decoder layer and its inputs."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding


def small_block() -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """The block, hidden states for it and its other arguments. Its matrices are of three sizes: 32 × 32 (query and
    output), 32 × 16 (key and value), 32 × 96 and back."""
    settings = LlamaConfig(
        hidden_size=32,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    hidden = torch.randn(2, 20, 32, requires_grad=True)
    positions = LlamaRotaryEmbedding(settings)(hidden, torch.arange(20)[None])
    return LlamaDecoderLayer(settings, 0), hidden, {"position_embeddings": positions}
