"""Shared by the import tests: small models with random values everywhere, and checks of an imported folder."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from shoal.data.tokenizer import load_tokenizer
from tests.models.small import loaded, plain, small_config, tokens

Weights = dict[str, Tensor]


def model_of(family: str, *, tied: bool = False, **changes: Any) -> Any:
    settings = small_config(family, tied=tied)
    for key, value in changes.items():
        setattr(settings, key, value)
    model = plain(settings)
    for parameter in model.parameters():  # biases and norms are initialized to zeros and ones, which would hide errors
        torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def rounded(model: Any) -> Any:
    """Cast the weights to bf16, but not the buffers, which transformers never casts."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def save_config(model: Any, folder: Path) -> Path:
    """A folder for --model: the config and a tokenizer, without weights."""
    model.config.save_pretrained(folder)
    load_tokenizer("bytes").save(folder)
    return folder


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens()).logits


def holds(folder: Path, model: Any) -> None:
    """Transformers and shoal both load exactly `model` from `folder`."""
    found, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info.get(key) for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs")), info
    expected = dict(model.named_parameters())
    assert expected.keys() == dict(found.named_parameters()).keys()
    assert [name for name, one in found.named_parameters() if not torch.equal(one, expected[name])] == []
    assert torch.equal(logits_of(found), logits_of(model))
    ours = dict(loaded(folder, dtype=model.dtype).named_parameters())
    assert [name for name in expected if not torch.equal(ours[name], expected[name])] == []
