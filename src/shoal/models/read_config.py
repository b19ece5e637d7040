"""Read the config.json of a Hugging Face folder, and say what is wrong with one that describes no model.

transformers checks little: with no layers it builds a model that learns nothing, and most other mistakes are exceptions
of many types from inside of it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.catalogue.causal_models import POSITIONS_AFTER_PADDING
from shoal.config.schema_base import MOST_IN_SIZE, MOST_LAYERS
from shoal.mistakes import UserMistake

# Without one of these there is no model; other counts may be zero (experts) or left out (key-value heads).
SIZES = {
    "hidden_size": MOST_IN_SIZE,
    "num_hidden_layers": MOST_LAYERS,
    "num_attention_heads": MOST_IN_SIZE,
    "vocab_size": MOST_IN_SIZE,
}


def read_settings(folder: Path) -> Any:
    """The transformers config in `folder`; a UserMistake if there is none or it is of no model."""
    from transformers import AutoConfig, PretrainedConfig

    file = folder / "config.json"
    given = read_json_object(file)
    if given.get("quantization_config"):
        raise UserMistake(f"{folder} holds quantized weights, which cannot be trained; use the original model.")
    _check_sizes(file, given)
    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # of many types: each model has code of its own
        raise UserMistake(f"{file} cannot be read as a transformers model: {_reason(error, given)}") from None
    text = settings.get_text_config()
    if not isinstance(text, PretrainedConfig):
        raise UserMistake(f"{file}: text_config must be a mapping, but is {text!r}.")
    spelled = {name: text.attribute_map.get(name, name) for name in SIZES}
    try:
        sizes = {key: getattr(text, name) for name, key in spelled.items() if hasattr(text, name)}
    except Exception:  # transformers has no common value of what per_layer_config sets
        raise UserMistake(f"{file}: its layers differ in size (per_layer_config), which is not supported.") from None
    _check_sizes(file, sizes, spelled)
    for name in ("sliding_window", "max_position_embeddings"):  # compared with the length of sequences
        if not isinstance(value := getattr(text, name, None), int | None):
            raise UserMistake(f"{file}: {name} is {value!r}, but must be an integer.")
    return settings


def count_positions(settings: Any) -> int | None:
    """The longest sequence that a model with this transformers config supports, if it states one."""
    text = settings.get_text_config()
    value = getattr(text, "max_position_embeddings", None)
    if value and str(text.model_type) in POSITIONS_AFTER_PADDING:
        value -= (text.pad_token_id or 0) + 1
    return int(value) if value else None


def unbuildable(settings: Any, folder: Path, error: Exception) -> UserMistake:
    """The sentence for a config from which transformers could not build a model."""
    return UserMistake(
        f"{folder / 'config.json'} describes a model that transformers cannot build: "
        f"{_reason(error, settings.to_dict())}"
    )


def read_json_object(file: Path, holds: str = "the model's config") -> dict[str, Any]:
    """The object in a JSON file; a UserMistake if there is none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise UserMistake(f"{file} cannot be read as JSON.") from None
    if not isinstance(content, dict):
        raise UserMistake(f"{file} must be a JSON object with {holds}.")
    return content


def _check_sizes(file: Path, given: Mapping[str, Any], spelled: Mapping[str, str] | None = None) -> None:
    """`spelled`: what a family calls them, if not by the usual names."""
    for name, most in SIZES.items():
        key = name if spelled is None else spelled[name]
        value = given.get(key)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
            raise UserMistake(f"{file}: {key} is {value!r}, but must be an integer from 1 to {most}.")


def _reason(error: Exception, settings: Mapping[str, Any]) -> str:
    """What an exception of transformers means, in one line that names the key of config.json where that is known."""
    if isinstance(error, KeyError) and error.args:
        keys = [key for key, value in _leaves(settings) if value == error.args[0]]
        if keys:
            return f"its {keys[0]} is {error.args[0]!r}, which transformers does not know."
    pad, vocabulary = settings.get("pad_token_id"), settings.get("vocab_size")
    if isinstance(error, AssertionError) and isinstance(pad, int) and isinstance(vocabulary, int) and pad >= vocabulary:
        return f"its pad_token_id is {pad}, but the vocabulary has {vocabulary} tokens."
    words = " ".join(str(error.args[0] if error.args else "").split())
    return words if isinstance(error, ValueError | OSError) and words else f"{type(error).__name__}: {words}"


def _leaves(value: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from _leaves(inner, f"{above}{key}.")
        else:
            yield f"{above}{key}", inner
