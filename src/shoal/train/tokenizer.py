"""Which tokenizer a config means. Without torch, so that data can be inspected in a moment."""

from pathlib import Path

from shoal.config.schema import ModelConfig
from shoal.data.tokenizer import BUILT_IN, load_tokenizer
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.hub import local_folder
from shoal.paths import user_path


def load_model_tokenizer(model: ModelConfig, folder: Path | None) -> Tokenizer:
    """The tokenizer of a config, with its added tokens. `folder` is that of the model, if there is one."""
    name, added = model.tokenizer, model.add_tokens
    if name in BUILT_IN:
        return load_tokenizer(name, add_tokens=added)
    if name is not None:
        given = user_path(name, "model.tokenizer")
        return load_tokenizer(name, given if given.is_dir() else local_folder(name), add_tokens=added)
    if folder is None:
        raise UserMistake(
            "model.shape gives random weights and no tokenizer; set model.tokenizer to a folder, a cached id, or bytes."
        )
    return load_tokenizer(str(folder), folder, add_tokens=added)
