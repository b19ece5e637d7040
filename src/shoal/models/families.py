"""The transformers config of a shape, for each family that can be trained.

Rotary settings go in `rope_parameters`, where transformers 5 keeps them for every family. Dropout is zero everywhere:
today language models are pretrained without it, and with the published 0.1 of GPT-2 and BERT equal runs on different
meshes would draw different masks.
"""

from collections.abc import Callable
from typing import Any

import shoal.offline  # noqa: F401
from shoal.catalogue.model_shape import ModelShape
from shoal.mistakes import UserMistake


def transformers_config(shape: ModelShape, *, encoder: bool = False) -> Any:
    """The config from which transformers builds exactly this shape as a causal language model, or as an encoder."""
    if not shape.is_family:
        raise UserMistake(
            f"Shapes of {shape.model_type} are for the forecast only: train such a model from a folder or a cached id "
            "with model.from, or choose a llama or qwen3 shape of a similar size."
        )
    if not shape.traits.buildable:
        raise UserMistake(
            f"Shapes of the family {shape.family} are for the forecast only: `shoal plan` supports them, training does "
            f"not. Choose a gpt2, neox or llama shape of a similar size."
        )
    found = BUILDERS[shape.family](shape)
    if encoder:
        found.is_decoder = False
    return found


def _settings(shape: ModelShape, **values: Any) -> Any:
    # Imported here: it takes seconds, and `offline` must come first.
    from transformers import AutoConfig

    return AutoConfig.for_model(shape.traits.model_type, **values)


def _common(shape: ModelShape) -> dict[str, Any]:
    """The settings with the same name in every config class."""
    return {
        "vocab_size": shape.vocab,
        "initializer_range": shape.initializer_range,
        "tie_word_embeddings": shape.tied,
        # Set even if None: the defaults of the classes are ids of a published tokenizer, which may be outside
        # this vocabulary.
        "bos_token_id": shape.bos,
        "eos_token_id": shape.eos,
        "pad_token_id": None,
    }


def _sizes(shape: ModelShape) -> dict[str, Any]:
    """The sizes, with the names of all config classes except GPT-2's."""
    return {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "intermediate_size": shape.ffn,
        "max_position_embeddings": shape.positions,
    }


def _gated(shape: ModelShape) -> dict[str, Any]:
    """What Llama, Mistral and Qwen share: RMS norms, grouped heads, rotary positions."""
    return {
        **_common(shape),
        **_sizes(shape),
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": shape.norm_eps,
        "rope_parameters": _rope_parameters(shape),
        "attention_dropout": 0.0,
    }


def _rope_parameters(shape: ModelShape) -> dict[str, Any]:
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        settings |= {
            "rope_type": "llama3",
            "factor": shape.rope_scaling.factor,
            "low_freq_factor": shape.rope_scaling.low_frequency_factor,
            "high_freq_factor": shape.rope_scaling.high_frequency_factor,
            "original_max_position_embeddings": shape.rope_scaling.original_positions,
        }
    return settings


def _llama(shape: ModelShape) -> Any:
    return _settings(shape, **_gated(shape), head_dim=shape.head_size)


def _mistral(shape: ModelShape) -> Any:
    return _settings(shape, **_gated(shape), head_dim=shape.head_size, sliding_window=shape.sliding_window)


def _qwen2(shape: ModelShape) -> Any:
    return _settings(shape, **_gated(shape), **_window(shape))


def _qwen3(shape: ModelShape) -> Any:
    return _settings(shape, **_gated(shape), **_window(shape), head_dim=shape.head_size)


def _window(shape: ModelShape) -> dict[str, Any]:
    # Qwen's classes apply the window only from layer `max_window_layers` on; a shape's window is for all layers.
    if shape.sliding_window is None:
        return {"use_sliding_window": False, "sliding_window": None, "max_window_layers": shape.layers}
    return {"use_sliding_window": True, "sliding_window": shape.sliding_window, "max_window_layers": 0}


def _neox(shape: ModelShape) -> Any:
    return _settings(
        shape,
        **_common(shape),
        **_sizes(shape),
        layer_norm_eps=shape.norm_eps,
        rope_parameters={**_rope_parameters(shape), "partial_rotary_factor": shape.rotary_share},
        use_parallel_residual=shape.parallel_residual,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )


def _gpt2(shape: ModelShape) -> Any:
    return _settings(
        shape,
        **_common(shape),
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.ffn,
        n_positions=shape.positions,
        layer_norm_epsilon=shape.norm_eps,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        resid_pdrop=0.0,
    )


def _bert(shape: ModelShape) -> Any:
    return _settings(
        shape,
        **_common(shape),
        **_sizes(shape),
        type_vocab_size=shape.traits.segments,
        layer_norm_eps=shape.norm_eps,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        is_decoder=True,  # causal attention: otherwise every token would attend to its own label
    )


BUILDERS: dict[str, Callable[[ModelShape], Any]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "neox": _neox,
    "gpt2": _gpt2,
    "bert": _bert,
}
