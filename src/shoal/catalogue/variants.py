"""What a config.json says of a model that its type does not: biases, norms and widths that not all of a type have.

Each function takes the shape that the sizes imply, and returns the model's own.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shoal.catalogue.model_shape import ModelShape

Settings = Mapping[str, Any]


def as_configured(shape: ModelShape, settings: Settings) -> ModelShape:
    """The shape of a model of its type with these settings; sizes that are not integers raise a TypeError or
    ValueError."""
    change = VARIANTS.get(shape.model_type)
    return shape if change is None else change(shape, settings)


def _llama(shape: ModelShape, settings: Settings) -> ModelShape:
    biases = _attention_biases(shape) if settings.get("attention_bias") else 0
    biases += 2 * shape.ffn + shape.hidden if settings.get("mlp_bias") else 0
    return replace(shape, others=shape.others + biases)


def _internlm(shape: ModelShape, settings: Settings) -> ModelShape:
    biases = _attention_biases(shape) if settings.get("bias", True) else 0
    return replace(shape, others=shape.others + biases)


def _neox(shape: ModelShape, settings: Settings) -> ModelShape:
    biases = 0 if settings.get("attention_bias", True) else _attention_biases(shape)
    parallel = bool(settings.get("use_parallel_residual", True))
    return replace(shape, others=shape.others - biases, parallel_residual=parallel)


def _opt(shape: ModelShape, settings: Settings) -> ModelShape:
    """The 350m norms after its layers, has no final norm, and embeddings that are narrower than its blocks."""
    hidden, width = shape.hidden, int(settings.get("word_embed_proj_dim") or shape.hidden)
    outside = (width - hidden) * shape.vocab + (2 * hidden * width if width != hidden else 0)
    others, affine = shape.others, settings.get("layer_norm_elementwise_affine", True)
    final = settings.get("do_layer_norm_before", True) and not settings.get("_remove_final_layer_norm")
    if not settings.get("enable_bias", True):
        others -= _attention_biases(shape) + shape.ffn + hidden
    if not affine:
        others -= 4 * hidden
    if not (affine and final):
        outside -= 2 * hidden
    return replace(shape, others=others, outside=outside)


def _falcon(shape: ModelShape, settings: Settings) -> ModelShape:
    new, parallel = bool(settings.get("new_decoder_architecture")), bool(settings.get("parallel_attn", True))
    keys = 1 if settings.get("multi_query", True) else shape.heads
    if new:
        keys = int(settings.get("num_kv_heads") or shape.heads)
    norms = settings.get("num_ln_in_parallel_attn") or (2 if new else 1)
    shape = replace(shape, ffn=int(settings.get("ffn_hidden_size") or 4 * shape.hidden))
    shape = replace(shape, kv_heads=keys, parallel_residual=parallel, shared_norm=parallel and norms == 1)
    biases = _attention_biases(shape) + shape.ffn + shape.hidden if settings.get("bias") else 0
    return replace(shape, others=shape.others + biases)


def _gpt_bigcode(shape: ModelShape, settings: Settings) -> ModelShape:
    return replace(shape, kv_heads=1 if settings.get("multi_query", True) else shape.heads)


def _phi(shape: ModelShape, settings: Settings) -> ModelShape:
    norms = 4 * shape.head_size if settings.get("qk_layernorm") else 0
    return replace(shape, others=shape.others + norms)


def _stablelm(shape: ModelShape, settings: Settings) -> ModelShape:
    queries, keys = shape.query_width, shape.kv_width
    others = queries + 2 * keys if settings.get("use_qkv_bias") else 0
    others += queries + keys if settings.get("qk_layernorm") else 0
    return replace(shape, others=shape.others + others, shared_norm=bool(settings.get("use_parallel_residual")))


def _cohere(shape: ModelShape, settings: Settings) -> ModelShape:
    norms = shape.query_width + shape.kv_width if settings.get("use_qk_norm") else 0
    return _llama(replace(shape, others=shape.others + norms), settings)


def _qwen(shape: ModelShape, settings: Settings) -> ModelShape:
    """Its intermediate size is that of both halves of the gated MLP."""
    shape = replace(shape, ffn=shape.ffn // 2, head_size=int(settings.get("kv_channels") or shape.head_size))
    biases = 0 if settings.get("no_bias", True) else 2 * shape.hidden + 2 * shape.ffn
    return replace(shape, others=shape.others + biases)


def _encoder(shape: ModelShape, settings: Settings) -> ModelShape:
    segments = int(settings.get("type_vocab_size", 2))
    return replace(shape, outside=shape.outside + (segments - shape.traits.segments) * shape.hidden)


def _electra(shape: ModelShape, settings: Settings) -> ModelShape:
    """The embeddings may be narrower than the blocks, and so is then all of the head."""
    hidden, width = shape.hidden, int(settings.get("embedding_size") or 128)
    if width == hidden:
        return _encoder(shape, settings)
    rows = shape.vocab + shape.positions + int(settings.get("type_vocab_size", 2))
    outside = width * rows - hidden * (rows - int(settings.get("type_vocab_size", 2)) + shape.traits.segments)
    # The norm of the embeddings, their projection, and the head's linear layer and norm.
    outside += 2 * (width - hidden) + hidden * width + hidden
    outside += hidden * width + 3 * width - (hidden * hidden + 3 * hidden)
    return replace(shape, outside=shape.outside + outside)


def _esm(shape: ModelShape, settings: Settings) -> ModelShape:
    """Beside the language model's head there is one for contacts, which has a weight for every head of every layer."""
    outside = shape.layers * shape.heads + 1
    outside += 2 * shape.hidden if settings.get("emb_layer_norm_before") else 0
    outside += shape.positions * shape.hidden if settings.get("position_embedding_type") == "absolute" else 0
    return replace(shape, outside=shape.outside + outside)


def _attention_biases(shape: ModelShape) -> int:
    return shape.query_width + 2 * shape.kv_width + shape.hidden


# By transformers' model_type.
VARIANTS: dict[str, Callable[[ModelShape, Settings], ModelShape]] = {
    "bert": _encoder,
    "camembert": _encoder,
    "cohere": _cohere,
    "electra": _electra,
    "esm": _esm,
    "falcon": _falcon,
    "gpt_bigcode": _gpt_bigcode,
    "gpt_neox": _neox,
    "internlm": _internlm,
    "llama": _llama,
    "opt": _opt,
    "phi": _phi,
    "qwen": _qwen,
    "roberta": _encoder,
    "stablelm": _stablelm,
    "xlm-roberta": _encoder,
}
