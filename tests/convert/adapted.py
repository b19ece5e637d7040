"""Small base models and runs that train adapters on them."""

from pathlib import Path
from typing import Any

from transformers import GPT2Config, GPTNeoXConfig, LlamaConfig

from tests.harness import settings
from tests.models.small import plain

SIZES = {"vocab_size": 260, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257}
BASES: dict[str, Any] = {
    "llama": LlamaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        tie_word_embeddings=True,
        **SIZES,
    ),
    "neox": GPTNeoXConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        tie_word_embeddings=False,
        **SIZES,
    ),
    "gpt2": GPT2Config(n_embd=32, n_layer=2, n_head=4, **SIZES),
}
LORA = {"kind": "lora", "rank": 4, "alpha": 8}


def make_base(family: str, folder: Path) -> Path:
    """A folder with a model whose weights are large enough for an adapter to change its logits."""
    described = BASES[family]
    described.initializer_range = 0.2
    plain(described).save_pretrained(folder)
    return folder


def config_of(
    data: Path, base: Path, adapter: dict[str, Any], tokens: list[str] | None = None, **changes: Any
) -> dict[str, Any]:
    return settings(
        data,
        model={"from": str(base), "tokenizer": "bytes", "add_tokens": tokens or []},
        adapter=adapter,
        **{
            "train__steps": 3,
            "train__lr": 1e-2,
            "train__global_batch": 2,
            "train__micro_batch": 1,
            "data__max_length": 48,
            "data__train_on": "all",
            "checkpoint__every": 3,
            **changes,
        },
    )
