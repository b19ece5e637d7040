"""The shape of the model that a config names: from the catalogue, or from the config.json of a Hugging Face folder.

Reads only that file and does not import transformers, so that the forecast stays fast.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.catalogue.architectures import ARCHITECTURES, CONFIG_DEFAULTS, TEXT_TYPES, Architecture, parts
from shoal.catalogue.causal_models import ALWAYS_ENCODERS, ENCODERS, PACKED, UNPACKED
from shoal.catalogue.families import ATTENTION_DROPOUT, BY_MODEL_TYPE, FAMILIES, HIDDEN_DROPOUT
from shoal.catalogue.hub_names import name_of, plain
from shoal.catalogue.shapes import NAMED, ModelShape, find_shape, grown_vocabulary
from shoal.catalogue.variants import as_configured
from shoal.config.schema import ModelConfig
from shoal.config.schema_base import MOST_IN_SIZE, MOST_LAYERS
from shoal.mistakes import UserMistake, suggestion
from shoal.paths import user_path

# Names of the same size in different configs.
_NAMES = {
    "hidden": ("hidden_size", "n_embd", "n_embed", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "vocab": ("vocab_size",),
}
FFN_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size")
POSITIONS_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "model_max_length")
# Types that also are decoders alone, which is what is trained of them.
CAUSAL = PACKED.union(*UNPACKED.values())
SLIDING = "sliding_attention"  # in `layer_types`


def read_shape(model: ModelConfig) -> ModelShape:
    """The shape of the model that a config names."""
    if model.shape is not None:
        shape = find_shape(model.shape) if isinstance(model.shape, str) else model.shape.named()
    else:
        assert model.from_ is not None, "the config demands one of model.from and model.shape"
        shape = _from_name(model.from_)
    # At most: without the tokenizer it is not known whether the vocabulary has spare rows for them.
    return replace(shape, vocab=grown_vocabulary(shape.vocab, shape.vocab + len(model.add_tokens)))


def has_dropout(model: ModelConfig) -> bool:
    """Whether the model has dropout on the hidden states; named shapes have none unless the config sets it."""
    if model.dropout is not None:
        return model.dropout > 0 and read_shape(model).traits.hidden_dropout
    return _is_set(model, HIDDEN_DROPOUT)


def drops_attention(model: ModelConfig) -> bool:
    """Whether the model has dropout on the attention weights, which every family can."""
    return model.dropout > 0 if model.dropout is not None else _is_set(model, ATTENTION_DROPOUT)


def _is_set(model: ModelConfig, names: tuple[str, ...]) -> bool:
    """Whether one of these probabilities in the model's config.json is not 0."""
    if model.from_ is None or (folder := _folder(model.from_)) is None:
        return False
    settings, found = text_settings(_read(folder)), 0.0
    for name in names:
        value = settings.get(name) or 0.0
        if not isinstance(value, int | float):
            raise UserMistake(f"{folder / 'config.json'}: {name} is {value!r}, but must be a number.")
        found = max(found, value)
    return found > 0


def shape_from_settings(settings: Mapping[str, Any], source: str = "config.json") -> ModelShape:
    """The shape that a transformers config, as a mapping, describes."""
    settings = text_settings(settings)
    kind = _model_type(settings)
    settings = {**CONFIG_DEFAULTS.get(kind, {}), **settings}
    has_both = bool(settings.get("is_encoder_decoder"))
    if has_both and kind not in CAUSAL:
        raise _encoder_decoder(source, kind)
    sizes: dict[str, int] = {}
    for name, spellings in _NAMES.items():
        key = next((each for each in spellings if settings.get(each) is not None), None)
        if key is None and has_both:
            raise _encoder_decoder(source, kind)
        if key is None:
            raise UserMistake(f"{source} has no {spellings[0]}, so the size of the model is unknown.")
        sizes[name] = _count(source, key, settings[key], 1, MOST_LAYERS if name == "layers" else MOST_IN_SIZE)
    hidden, heads = sizes["hidden"], sizes["heads"]
    # Unknown architectures are counted as Llama if their MLP is gated, as nearly all are, else as neox.
    gated = "intermediate_size" in settings and "silu" in str(settings.get("hidden_act", "silu"))
    usual = "bert" if kind in (*ENCODERS, *ALWAYS_ENCODERS) else "llama" if gated else "neox"
    known = ARCHITECTURES.get(kind)
    family = known.family if known else BY_MODEL_TYPE.get(kind, usual)
    ffn = next((settings[one] for one in FFN_NAMES if settings.get(one)), 4 * hidden)
    positions = next((settings[one] for one in POSITIONS_NAMES if settings.get(one)), 2048)
    values = {"intermediate_size": ffn, "max_position_embeddings": positions}
    values |= {key: settings.get(key) or 0 for key in ("num_key_value_heads", "head_dim", "sliding_window")}
    for key, value in values.items():
        if isinstance(value, list | dict):
            raise UserMistake(f"{source}: {key} is {value}, but the forecast needs one integer for all blocks.")
        _count(source, key, value, 0, MOST_IN_SIZE)
    if hidden % heads and not (settings.get("head_dim") or settings.get("kv_lora_rank")):
        raise UserMistake(f"{source}: hidden size {hidden} is not divisible by {heads} heads.")
    ungrouped = _is_known(kind) and not FAMILIES[family].grouped  # whatever its config says
    keys = heads if ungrouped else int(settings.get("num_key_value_heads") or heads)
    if heads % keys:
        raise UserMistake(f"{source}: {heads} attention heads are not a multiple of {keys} key-value heads.")
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    sliding = _sliding_share(settings, sizes["layers"])
    head_size = int(settings.get("head_dim") or hidden // heads)
    try:
        found = parts(
            settings,
            known or Architecture(family),
            hidden=hidden,
            layers=sizes["layers"],
            query_width=heads * head_size,
            kv_width=keys * head_size,
            head_size=head_size,
            ffn=int(ffn),
        )
    except (KeyError, TypeError, ValueError):
        raise UserMistake(
            f"{source} does not state the sizes of its experts or of its attention as integers."
        ) from None
    shape = ModelShape(
        family=family,
        hidden=hidden,
        layers=sizes["layers"],
        heads=heads,
        kv_heads=heads if found.latent else keys,
        ffn=found.ffn,
        others=found.others,
        routed=found.routed,
        experts=found.experts,
        latent=found.latent,
        vocab=sizes["vocab"],
        positions=int(positions),
        tied=bool(settings.get("tie_word_embeddings", known.tied if known else _ties(kind, family))),
        head_size=found.latent.head_size if found.latent else head_size,
        sliding_window=int(window) if window and sliding else None,
        sliding_share=sliding or 1.0,
        model_type=kind,
    )
    try:
        return as_configured(shape, settings)
    except (TypeError, ValueError):
        raise UserMistake(f"{source} does not state the sizes of a {kind} as integers.") from None


def _encoder_decoder(source: str, kind: str) -> UserMistake:
    return UserMistake(
        f"{source}: a {kind} has an encoder and a decoder, and models of both are neither trained nor forecast; "
        "use a decoder or an encoder, such as model.shape llama3.2-1b or bert-base."
    )


def _sliding_share(settings: Mapping[str, Any], layers: int) -> float:
    """The share of layers with the sliding window, if there is one: each layer has a type, or every n-th has none."""
    kinds, every = settings.get("layer_types"), settings.get("sliding_window_pattern")
    if isinstance(kinds, list) and kinds:
        return kinds.count(SLIDING) / len(kinds)
    return 1 - layers // every / layers if isinstance(every, int) and every > 0 else 1.0


def _ties(kind: str, family: str) -> bool:
    """Whether a config that does not say has tied embeddings."""
    return kind in BY_MODEL_TYPE and FAMILIES[family].tied


def unknown_architecture(model: ModelConfig) -> str | None:
    """The type of the model in `model.from`, if the forecast does not know its architecture."""
    if model.shape is not None or model.from_ is None or (folder := _folder(model.from_)) is None:
        return None
    kind = _model_type(text_settings(_read(folder)))
    return None if _is_known(kind) else kind or "without a model_type"


def left_out_modules(model: ModelConfig) -> list[str]:
    """What of a multimodal model in `model.from` is not forecast."""
    if model.shape is not None or model.from_ is None or (folder := _folder(model.from_)) is None:
        return []
    settings = _read(folder)
    return [kind for kind in ("vision", "audio") if isinstance(settings.get(f"{kind}_config"), Mapping)]


def _is_known(kind: str) -> bool:
    """Whether the forecast knows the architecture of a type."""
    return kind in BY_MODEL_TYPE or kind in ARCHITECTURES


def _model_type(settings: Mapping[str, Any]) -> str:
    kind = str(settings.get("model_type", ""))
    return TEXT_TYPES.get(kind, kind)


def _count(source: str, key: str, value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise UserMistake(f"{source}: {key} is {value!r}, but must be an integer from {least} to {most}.")
    return value


def text_settings(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the text model, also of a multimodal one."""
    inner = settings.get("text_config")
    return {**settings, **inner} if isinstance(inner, Mapping) else settings


def _from_name(name: str) -> ModelShape:
    folder = _folder(name)
    if folder is not None:
        return shape_from_settings(_read(folder), str(folder / "config.json"))
    known = name_of(name)
    if known is not None:
        return NAMED[known]
    if (file := user_path(name, "model.from")).is_file():
        raise UserMistake(f"{file} is a file; model.from is the folder that it is in: model.from={file.parent}")
    raise UserMistake(
        f"{name} is neither a folder with a config.json nor in the local Hugging Face cache, so its size is unknown."
        f"{suggestion(plain(name), NAMED)} Use model.shape=NAME, of which docs/models.md has the names."
    )


def _folder(name: str) -> Path | None:
    """The local folder with the model's config.json."""
    path = user_path(name, "model.from")
    for folder in (path, path / "model"):  # a model, or a run
        if (folder / "config.json").is_file():
            return folder
    cache = os.environ.get("HF_HUB_CACHE") or str(
        Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    )
    snapshots = Path(cache) / f"models--{name.replace('/', '--')}" / "snapshots"
    found = sorted(snapshots.glob("*/config.json"), key=lambda file: file.stat().st_mtime)
    return found[-1].parent if found else None


def _read(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        raise UserMistake(f"{file} cannot be read as JSON.") from None
    if not isinstance(settings, dict):
        raise UserMistake(f"{file} must be a JSON object with the model's config.")
    return settings
