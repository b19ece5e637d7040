"""The causal language models of transformers by type: which keep packed documents apart, and which are not causal.

`tests/models/test_every_type.py` trains each type beside transformers' own model and compares these tables with what
it finds. A type that is not listed here, of a newer version, uses the masks of transformers and is not packed.
"""

from typing import Any

# In a packed sequence, the loss of each document is what it is without the others.
PACKED = frozenset({
    "afmoe", "apertus", "arcee", "aria_text", "axk1", "axk2", "beam", "bert", "bert-generation", "big_bird",
    "biogpt", "bitnet", "codegen", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx",
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "diffllama", "doge", "dots1", "electra",
    "ernie", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "falcon", "flex_olmo", "flint", "gemma", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "git", "glm", "glm4", "glm4_moe",
    "glm4_moe_lite", "glm_moe_dsa", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss",
    "gptj", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "internlm3",
    "iquestcoder", "jais2", "jetmoe", "kolibri1", "laguna",
    "llama", "longcat_flash", "megatron-bert", "mellum", "mimo_v2_flash", "minicpm3", "minimax_m2", "ministral",
    "ministral3", "mistral", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron",
    "olmo", "olmo2", "olmo3", "olmoe", "opt", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "rembert", "roc_bert", "roformer", "seed_oss", "smollm3", "solar_open",
    "stablelm", "starcoder2", "vaultgemma", "whisper", "xglm", "youtu",
})  # fmt: skip
# Of these, those that cannot do without a mask where attention is causal: they compute another one from it.
MASKED = frozenset({"axk2", "deepseek_v32", "doge", "glm_moe_dsa"})

# Types whose documents would influence each other, by the reason.
UNPACKED = {
    "its recurrent or convolutional state is carried from one document of a sequence to the next": (
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "inkling2_text",
        "inkling_text", "jamba",
        "kimi_linear", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax", "nemotron_h",
        "olmo_hybrid",
        "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "qwen4_exp_text", "recurrent_gemma", "rwkv", "xlstm",
        "zamba", "zamba2", "zaya",
    ),
    "its positions do not restart with each document of a sequence": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "camembert", "data2vec-text", "llama4_text",
        "marian", "mbart", "mvp", "pegasus", "plbart", "roberta", "roberta-prelayernorm", "trocr",
        "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    "its attention takes no mask that would keep the documents of a sequence apart": (
        "bloom", "blt", "deepseek_v4", "minimax_m3_vl_text", "moshi", "openai-gpt", "xlm", "xlnet",
    ),
}  # fmt: skip

# Trained as decoders only if their config says so.
ENCODERS = (
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
# Their first token has the position after that of padding: they support so many tokens fewer.
POSITIONS_AFTER_PADDING = frozenset({
    "camembert", "data2vec-text", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
# Encoders that transformers has no decoder of.
ALWAYS_ENCODERS = (
    "albert", "convbert", "deberta", "deberta-v2", "distilbert", "esm", "eurobert", "funnel", "ibert",
    "jina_embeddings_v3", "layoutlm", "longformer", "luke", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert",
    "nystromformer", "splinter", "squeezebert", "yoso",
)  # fmt: skip
# By type, the setting with which it is causal.
CAUSAL_IF: dict[str, tuple[str, Any]] = {
    **dict.fromkeys(ENCODERS, ("is_decoder", True)),
    "xlm": ("causal", True),
    "xlnet": ("attn_type", "uni"),
}
NEVER_CAUSAL = {
    "cpmant": "it attends to its whole prompt",
    "prophetnet": "it predicts several tokens at once",
    "reformer": "its buckets depend on later tokens",
}
# Types with other tensors than embedding and head that have a row per token.
ROWS_ELSEWHERE = {
    "blt": "its tokens are bytes, which are also hashed",
    "deepseek_v4": "its first layers have a table of each token's experts",
    "marian": "its decoder has a vocabulary of its own",
}


def why_no_new_tokens(model_type: str, settings: Any) -> str | None:
    """Why tokens cannot be added to a model with these settings; None: they can."""
    if getattr(settings, "hidden_size_per_layer_input", None):
        return f"{model_type} has an embedding per layer"
    return f"{model_type}: {ROWS_ELSEWHERE[model_type]}" if model_type in ROWS_ELSEWHERE else None


def why_not_packed(model_type: str) -> str | None:
    """Why packed documents would influence each other in a model of this type; None: they do not."""
    if model_type in PACKED:
        return None
    for reason, types in UNPACKED.items():
        if model_type in types:
            return f"{model_type} cannot keep documents apart: {reason}"
    return f"whether {model_type} keeps documents apart is not tested"


def why_no_encoder(model_type: str, settings: Any) -> str | None:
    """Why a model with these settings is no bidirectional encoder; None: it is one."""
    if model_type in ALWAYS_ENCODERS:
        return None
    if model_type in ENCODERS:
        return f"this {model_type} is a decoder (is_decoder)" if getattr(settings, "is_decoder", False) else None
    return f"{model_type} is not an encoder: its tokens attend to earlier ones only"


def why_not_causal(model_type: str, settings: Any) -> str | None:
    """Why a model with these settings is not trained to predict the next token; None: it can be."""
    if model_type in ALWAYS_ENCODERS:
        return f"{model_type} is an encoder, in which every token would attend to its own label"
    if model_type in NEVER_CAUSAL:
        return f"{model_type} is not causal: {NEVER_CAUSAL[model_type]}"
    key, value = CAUSAL_IF.get(model_type, (None, None))
    if key is None or getattr(settings, key, None) == value:
        return None
    return f"this {model_type} is an encoder, in which every token would attend to its own label"
