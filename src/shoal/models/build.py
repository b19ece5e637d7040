"""Build a transformers model on the meta device from the config."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.catalogue.shapes import find_shape
from shoal.config.schema import ModelConfig
from shoal.mistakes import UserMistake
from shoal.models.attention import choose_attention
from shoal.models.families import transformers_config
from shoal.models.hub import local_folder


@dataclass(frozen=True)
class Blueprint:
    """A transformers config, and the folder of the weights if there is one."""

    settings: Any  # transformers.PretrainedConfig
    folder: Path | None

    @property
    def vocabulary(self) -> int:
        return int(self.settings.get_text_config().vocab_size)

    @property
    def positions(self) -> int | None:
        """The longest sequence the model supports, if its config states it."""
        value = getattr(self.settings.get_text_config(), "max_position_embeddings", None)
        return int(value) if value else None


def blueprint(model: ModelConfig) -> Blueprint:
    """Read the model's config. Does not read weights."""
    if model.shape is not None:
        shape = find_shape(model.shape) if isinstance(model.shape, str) else model.shape.named()
        return Blueprint(transformers_config(shape), None)
    assert model.from_ is not None, "the config demands one of model.from and model.shape"
    return read_blueprint(local_folder(model.from_))


def read_blueprint(folder: Path) -> Blueprint:
    """The model that a Hugging Face folder describes."""
    from transformers import AutoConfig

    try:
        settings = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (ValueError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserMistake(f"{folder}/config.json cannot be read as a transformers model: {reason}") from None
    if getattr(settings, "quantization_config", None):
        raise UserMistake(f"{folder} holds quantised weights, which cannot be trained; use the original model.")
    return Blueprint(settings, folder)


def build_on_meta(plan: Blueprint, *, attention: str, longest: int) -> Any:
    """The causal language model with all tensors on meta; `longest` is the length of the longest sequence."""
    from transformers import AutoModelForCausalLM

    settings = plan.settings
    try:
        with torch.device("meta"):
            # Ignores the attention implementation in config.json: it could name code on the hub, which transformers
            # would download and run.
            model = AutoModelForCausalLM.from_config(
                settings, dtype=torch.float32, trust_remote_code=False, attn_implementation=None
            )
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise UserMistake(
            f"{type(settings).__name__} is not a causal language model in transformers: {reason}"
        ) from None
    model.set_attn_implementation(choose_attention(model, attention, longest))
    return model.train()
