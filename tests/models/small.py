"""Small models of every family for the tests of this folder, and how a Hugging Face folder becomes one of ours."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from shoal.catalogue.shapes import shape_from_sizes
from shoal.config.schema import ModelConfig
from shoal.models.anatomy import read_anatomy
from shoal.models.build import Blueprint, blueprint, build_on_meta
from shoal.models.families import transformers_config
from shoal.models.weights import Weights, materialize

CPU = torch.device("cpu")
HIDDEN, LAYERS, FFN, VOCAB, POSITIONS = 32, 2, 48, 96, 64
GROUPED = ("llama", "mistral", "qwen2", "qwen3")
FAMILIES = (*GROUPED, "neox", "gpt2", "bert")


def small_config(family: str, *, tied: bool = True) -> Any:
    """Four heads of eight channels, and two key-value heads where the family can share them."""
    shape = shape_from_sizes(
        family,
        hidden=HIDDEN,
        layers=LAYERS,
        heads=4,
        kv_heads=2 if family in GROUPED else None,
        ffn=FFN,
        vocab=VOCAB,
        positions=POSITIONS,
        tied=tied or family == "bert",  # an untied BERT is refused
    )
    return transformers_config(shape)


def on_meta(settings: Any, *, attention: str = "auto", longest: int = POSITIONS) -> Any:
    return build_on_meta(Blueprint(settings, None), attention=attention, longest=longest)


def drawn(settings: Any, *, seed: int = 0, **options: Any) -> Any:
    """A model with random weights of ours."""
    model = on_meta(settings, **options)
    materialize(model, read_anatomy(model), device=CPU, dtype=torch.float32, source=Weights(None, seed))
    return model


def loaded(folder: Path, *, dtype: torch.dtype = torch.float32) -> Any:
    """The model of a Hugging Face folder, as a run with model.from would build and fill it."""
    plan = blueprint(ModelConfig.model_validate({"from": str(folder)}))
    model = build_on_meta(plan, attention="auto", longest=POSITIONS)
    materialize(model, read_anatomy(model), device=CPU, dtype=dtype, source=Weights(plan.folder, 0))
    return model


def plain(settings: Any, seed: int = 0) -> Any:
    """The same kind of model by transformers alone."""
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(settings)


def tokens(rows: int = 2, length: int = 24, seed: int = 5) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
