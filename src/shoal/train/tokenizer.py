"""Which tokenizer a config means. Without torch, so that data can be inspected in a moment."""

from collections.abc import Callable
from pathlib import Path

from shoal.config.schema import DataConfig, ModelConfig
from shoal.data.cells.gene_tokenizer import GeneTokenizer
from shoal.data.cells.make_tokenizer import are_cells, check_given, make_tokenizer
from shoal.data.tokenizer import BUILT_IN, load_tokenizer
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.models.hub import local_folder
from shoal.paths import user_path

Report = Callable[[str], None]


def load_model_tokenizer(
    model: ModelConfig, folder: Path | None, data: DataConfig | None = None, report: Report = lambda sentence: None
) -> Tokenizer:
    """The tokenizer of a config, with its added tokens. `folder` is that of the model, if there is one. With neither,
    `data` that is cells gives one."""
    cells = data is not None and are_cells(data)
    if cells and folder is None and model.tokenizer is None:
        assert data is not None
        if model.add_tokens:
            raise UserMistake("model.add_tokens: the tokens of cells are their genes; leave it out.")
        return make_tokenizer(data, report)
    found = _load(model, folder)
    if cells and isinstance(found, GeneTokenizer):
        assert data is not None
        check_given(data, found)
    return found


def check_sizes(vocabulary: int, positions: int | None, tokenizer: Tokenizer, data: DataConfig) -> None:
    """A UserMistake if the model has no rows for the tokenizer's tokens, or no positions for the sequences."""
    if tokenizer.size > vocabulary:
        raise UserMistake(
            f"The tokenizer has {tokenizer.size} tokens, but the model's vocabulary is {vocabulary}; "
            "give model.shape a vocab at least that large, another model.tokenizer, or the tokens that the model does "
            "not have as model.add_tokens."
        )
    if positions is not None and data.max_length > positions:
        raise UserMistake(
            f"data.max_length is {data.max_length}, but the model supports {positions} positions; "
            "lower it, or choose a model with a longer context."
        )


def _load(model: ModelConfig, folder: Path | None) -> Tokenizer:
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
