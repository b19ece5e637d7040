"""Converts a GGUF file to a Hugging Face folder. A GGUF file holds tensors and values, and no code."""

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import shoal.offline  # noqa: F401
from shoal.mistakes import UserMistake

# Tokenizers that split digits before the regular expression of byte-level BPE, by the name that llama.cpp gives them.
# transformers reads the vocabulary and the merges from the file, and takes the expression of GPT-2 for all.
SINGLE_DIGITS = ("smollm",)


def check_installed(needed_by: str) -> None:
    """A UserMistake if a package is missing with which transformers reads GGUF files: `needed_by` begins the
    sentence."""
    for package in ("gguf", "accelerate"):
        if find_spec(package) is None:
            raise UserMistake(f"{needed_by} needs the package {package}: pip install 'shoal[gguf]'.")


def convert_gguf(file: Path, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write config, weights, tokenizer and chat template of `file` into `folder`; returns the number of parameters.

    Quantized weights are dequantized, and saved as `dtype`.
    """
    check_installed(f"{file.name}, a GGUF file,")
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(
                **where, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
            )
            tokenizer = AutoTokenizer.from_pretrained(**where)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserMistake(f"{file} cannot be converted ({reason}); give a GGUF file of a causal model.") from None
    if _pretokenizer(file) in SINGLE_DIGITS:
        _split_digits(tokenizer)
    settings = model.config
    for name in ("_model_name_or_path", "quantization_config"):  # of the file: neither is true of the folder
        if hasattr(settings, name):
            delattr(settings, name)
    settings.bos_token_id, settings.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    settings.pad_token_id = tokenizer.pad_token_id
    model.generation_config = GenerationConfig.from_model_config(settings)
    tokenizer.model_max_length = settings.max_position_embeddings
    for name in ("is_local", "local_files_only"):  # how it was loaded
        tokenizer.init_kwargs.pop(name, None)
    with quiet():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def quiet() -> Iterator[None]:
    """Without the progress bars that transformers has no setting for, and without what DeepSpeed says of the machine
    when transformers imports it to save a model. A filter, since the import sets the level of DeepSpeed's logger."""
    logger = logging.getLogger("DeepSpeed")
    logger.addFilter(_drop)
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.removeFilter(_drop)


def _drop(_: logging.LogRecord) -> bool:
    return False


def _pretokenizer(file: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(file).get_field("tokenizer.ggml.pre")
    return None if field is None else str(field.contents())


def _split_digits(tokenizer: Any) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
