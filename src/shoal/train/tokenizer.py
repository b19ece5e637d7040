"""Which tokenizer a config means. Without torch, so that data can be inspected in a moment."""

from pathlib import Path

from shoal.config.schema import ModelConfig
from shoal.data.tokenizer import BUILT_IN, load_tokenizer
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.hub import local_folder
from shoal.paths import user_path


def load_model_tokenizer(model: ModelConfig, model_folder: Path | None) -> Tokenizer:
    """`model.tokenizer`, or that of the model in `model_folder`."""
    name = model.tokenizer
    if name in BUILT_IN:
        return load_tokenizer(name)
    if name is not None:
        folder = user_path(name, "model.tokenizer")
        return load_tokenizer(name, folder if folder.is_dir() else local_folder(name))
    if model_folder is None:
        raise UserMistake(
            "model.shape gives random weights and no tokenizer; set model.tokenizer to a folder, a cached id, or bytes."
        )
    return load_tokenizer(str(model_folder), model_folder)
