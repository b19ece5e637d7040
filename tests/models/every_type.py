"""A small config of every causal language model type in transformers, with each kind of its layers at least once."""

from typing import Any

import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from shoal.catalogue.causal_models import NEVER_CAUSAL, PACKED, UNPACKED

VOCAB, POSITIONS, WINDOW = 96, 64, 8

# By the names that config classes use.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embed_dim", "dim", "emb_dim"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_inner", "d_ff", "ffn_hidden_size", "mlp_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "block_ff_dim", "expert_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("shared_intermediate_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "linear_num_key_heads"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length"), POSITIONS
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "attention_window_size", "window_size"), WINDOW),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("linear_num_value_heads", "linear_num_heads"), 4),
    # Many heads, as a score is exactly 0 where none of them is positive, and then the choice among keys is arbitrary.
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 16),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 8),
    "index_topk": WINDOW,
    "use_sliding_window": True,
    "mlp_only_layers": [0],
    # Wider than the usual 0.02, which at this width leaves attention with hardly any effect.
    **dict.fromkeys(("initializer_range", "init_std"), 0.1),
    "vocab_size": VOCAB,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
}
# The number of layers, and the kind of each.
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")

FULL_AND_SLIDING = {"layer_types": ["full_attention", "sliding_attention"]}
DENSE_AND_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
SHARED_INDEX = {"indexer_types": ["full", "shared"]}
MAMBA2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": WINDOW}
# The last two layers attend to the keys of the first two.
SHARED_KEYS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_kv_shared_layers": 2}
PER_LAYER_INPUT = {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8}
GEMMA4 = {**SHARED_KEYS, "global_head_dim": 16}
GEMMA4_EXPERTS = {**GEMMA4, **PER_LAYER_INPUT, "enable_moe_block": True, "top_k_experts": 2}
# The layers without rotary positions scale queries by the position, in steps of `floor_scale`.
LLAMA4 = {"no_rope_layers": [1, 0], "moe_layers": [1], "floor_scale": 4}
QWEN4 = {
    "hc_lowrank": 8,
    "indexer_budget": WINDOW,
    "indexer_compress_ratio": 2,
    "indexer_kv_heads": 1,
    "make_ngram_vocab_size_divisible_by": 8,
    "ngram_vocab_size_base": 64,
    "ple_layer_ids": [1],
    "split_ngram_parts": 1,
}
# Its window layers have sizes of their own.
DOTS3 = {
    "head_dim": 16,
    "index_head_dim": 8,
    "shared_experts_intermediate_size": 48,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 2,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 24,
    "swa_head_dim": 20,
    "swa_qk_nope_head_dim": 12,
    "swa_v_head_dim": 8,
}
# Its hybrid layers share one transformer block.
ZAMBA = {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_key_value_heads": 4}
# What the table above does not make small, or makes inconsistent.
OTHERS: dict[str, dict[str, Any]] = {
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "blt": {
        "decoder_config": {"hidden_size_global": 32},
        "encoder_config": {"hidden_size_global": 32},
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 64,
    },
    "codegen": {"rotary_dim": 4},
    "cohere2_moe": {**DENSE_AND_SPARSE, "num_shared_experts": 1},
    "cohere_compass_text": {
        **FULL_AND_SLIDING,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
    },
    "cpmant": {"dim_ff": 48, "dim_head": 8, "prompt_length": 4},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"moe_top_k": 2},
    },
    "deepseek_v4": {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 4,
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 8,
    },
    "doge": {"keep_window_size": WINDOW},
    "dots1": FULL_AND_SLIDING,
    "dots3_note": {
        "text_config": DOTS3,
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32, "per_layer_config": {}},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": DOTS3,
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 64},
    "gemma3n_text": {
        **SHARED_KEYS,
        **PER_LAYER_INPUT,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
    },
    "gemma4": {"text_config": GEMMA4_EXPERTS},
    "gemma4_text": GEMMA4_EXPERTS,
    "gemma4_unified": {"text_config": GEMMA4},
    "gemma4_unified_text": GEMMA4,
    "glm_moe_dsa": SHARED_INDEX,
    "got_ocr2": {"text_config": FULL_AND_SLIDING, "vision_config": {"output_channels": 8, "image_size": 64}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {**MAMBA2, "layer_types": ["linear_attention", "full_attention"]},
    "hy_v4": SHARED_INDEX,
    "inkling2_text": {
        "log_scaling_n_floor": 4,
        "n_layers_per_attn_res_block": 1,
        "rel_extent": 16,
        "sliding_window_size": WINDOW,
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
    },
    "inkling_text": {
        **DENSE_AND_SPARSE,
        "log_scaling_n_floor": 4,
        "rel_extent": 16,
        "swa_head_dim": 8,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "laguna": FULL_AND_SLIDING,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention", "sliding_attention"]},
    "llama4": {"text_config": LLAMA4},
    "llama4_text": LLAMA4,
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": WINDOW},
    "mellum": {**FULL_AND_SLIDING, **DENSE_AND_SPARSE},
    "minimax": {"block_size": WINDOW},
    "minimax_m3_vl_text": {
        **DENSE_AND_SPARSE,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "dense_intermediate_size": 48,
        "index_block_size": 2,
        "index_n_heads": 2,
        "index_topk_blocks": 3,
    },
    "ministral": FULL_AND_SLIDING,
    # A cross-attention layer, which text does not use.
    "mllama": {"text_config": {"num_hidden_layers": 3, "cross_attention_layers": [1]}},
    # Its window is half of this.
    "modernbert-decoder": {"local_attention": 2 * WINDOW},
    "moss_transcribe_diarize": {"text_config": FULL_AND_SLIDING},
    "nemotron_h": {
        **dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "ssm_state_size"), 8),
        "n_groups": 1,
        "chunk_size": WINDOW,
    },
    "phi4_multimodal": {
        "audio_config": {"num_blocks": 1, "ext_pw_out_channel": 32, "nemo_conv_channels": 8},
        "vision_config": {"image_size": 64, "patch_size": 16},
    },
    "prophetnet": {"num_decoder_attention_heads": 4},
    "qwen2": FULL_AND_SLIDING,
    "qwen2_moe": FULL_AND_SLIDING,
    "qwen3": FULL_AND_SLIDING,
    "qwen4_exp": {"text_config": QWEN4},
    "qwen4_exp_text": QWEN4,
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        **dict.fromkeys(("local_attn_chunk_length", "lsh_attn_chunk_length"), WINDOW),
        "attention_head_size": 8,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "feed_forward_size": 48,
        "hash_seed": 0,
        "num_buckets": 4,
    },
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roc_bert": {
        **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim"), 8),
        **dict.fromkeys(("pronunciation_vocab_size", "shape_vocab_size"), VOCAB),
    },
    "smollm3": {**FULL_AND_SLIDING, "no_rope_layers": [1, 0]},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xlstm": {"chunk_size": WINDOW},
    "xmod": {"default_language": "en_XX"},
    "zamba": {**ZAMBA, "attention_head_dim": 16},
    "zamba2": {**ZAMBA, "chunk_size": WINDOW, "mamba_d_state": 8},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "num_experts_per_tok": 1, "router_hidden_size": 16},
}
# Those that no config makes run on text alone, and why.
UNBUILDABLE: dict[str, str] = {
    "emu3": "its text model is saved with a type that AutoModelForCausalLM does not know",
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "drafts from the hidden states and keys of another model",
    "gemma4_unified_assistant": "drafts from the hidden states and keys of another model",
    "mllama": "its text model is saved with a type that AutoModelForCausalLM does not know",
    "musicgen": "a decoder of audio codes, which AutoModelForCausalLM cannot build from the config of the whole",
    "musicgen_melody": "a decoder of audio codes, which AutoModelForCausalLM cannot build from the config of the whole",
}
# Those whose layers differ in size: refused.
UNEVEN = ("dots3_note", "dots3_note_text")
# The newest version of transformers whose types are all listed. Types of a later one are left aside.
LISTED_UP_TO = Version("5.23.0")


def is_listed(model_type: str) -> bool:
    if Version(transformers.__version__) <= LISTED_UP_TO:
        return True
    text = CONFIG_MAPPING[model_type]().get_text_config().model_type
    return text in PACKED or text in NEVER_CAUSAL or any(text in names for names in UNPACKED.values())


TYPES = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in (*UNBUILDABLE, *UNEVEN) and is_listed(name)]


def small_settings(model_type: str) -> Any:
    """The config, without dropout. Raises if this type cannot be small."""
    return shrink(CONFIG_MAPPING[model_type], OTHERS.get(model_type, {}))


def shrink(kind: Any, changes: dict[str, Any]) -> Any:
    """A config of class `kind` with the sizes above, also in the configs within it."""
    default = kind()
    values = default.to_dict()
    names = {*values, *default.attribute_map}
    given = {name: value for name, value in SIZES.items() if name in names}
    given |= {name: 0.0 for name in names if isinstance(values.get(name), float) and is_noise(name)}
    if "kv_lora_rank" in names:  # A latent expands to the keys of every head.
        given["num_key_value_heads"] = given["num_attention_heads"]
    kinds = {name: changes.get(name) or list(dict.fromkeys(values[name] or ())) for name in KINDS if name in values}
    if any(kinds.values()):
        count = max(2, *map(len, kinds.values()))
        given |= {name: (found * count)[:count] for name, found in kinds.items() if found}
        given |= {name: count for name in LAYERS if name in given}
    for name in kind.sub_configs:
        if name in names and getattr(default, name, None) is not None:
            found = type(getattr(default, name))
            given[name] = shrink(found, changes.get(name, {})).to_dict()
    given |= {name: value for name, value in changes.items() if name not in (*KINDS, *kind.sub_configs)}
    return kind(**given)


def is_noise(name: str) -> bool:
    return "dropout" in name or "jitter" in name or name.endswith(("pdrop", "layerdrop"))
