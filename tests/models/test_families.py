"""The transformers configs: exactly the shape's size, the published settings, no dropout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from shoal.catalogue.families import BUILDABLE
from shoal.catalogue.shapes import NAMED, ModelShape, parameters, shape_from_sizes
from shoal.config.schema import ModelConfig
from shoal.mistakes import UserMistake
from shoal.models.families import transformers_config
from shoal.plan.models import read_shape

TRAINABLE = [name for name, shape in NAMED.items() if shape.traits.buildable and shape.is_family]
FAMILY_NAMES = list(BUILDABLE)


def tiny(family: str, tied: bool = True) -> ModelShape:
    return shape_from_sizes(family, hidden=64, layers=2, heads=4, vocab=99, positions=32, tied=tied)


def count(shape: ModelShape) -> int:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(transformers_config(shape))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", TRAINABLE)
def test_the_model_transformers_builds_has_exactly_the_counted_parameters(name: str) -> None:
    assert count(NAMED[name]) == parameters(NAMED[name])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_explicit_sizes_are_counted_exactly_too(family: str, tied: bool) -> None:
    if family == "bert" and not tied:
        pytest.skip("refused: see catalogue.shapes")
    assert count(tiny(family, tied)) == parameters(tiny(family, tied))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_shared_key_value_heads_are_counted_exactly(family: str) -> None:
    shape = shape_from_sizes(
        family, hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=99, positions=32, tied=False
    )
    assert count(shape) == parameters(shape)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_heads_of_a_size_of_their_own_are_counted_exactly(family: str) -> None:
    sizes = {"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "head_size": 16, "vocab": 99, "positions": 32}
    shape = shape_from_sizes(family, **sizes, tied=True)  # type: ignore[arg-type]
    assert count(shape) == parameters(shape)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_is_causal_and_the_same_in_training_as_in_evaluation(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(transformers_config(tiny(family)))
    tokens = torch.randint(0, 99, (1, 32))
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 99
    with torch.no_grad():
        trained = model.train()(input_ids=tokens).logits
        # Dropout anywhere would make these differ.
        torch.testing.assert_close(model.eval()(input_ids=tokens).logits, trained)
        after_change = model(input_ids=changed).logits
    torch.testing.assert_close(after_change[:, :-1], trained[:, :-1])
    assert not torch.allclose(after_change[:, -1], trained[:, -1])


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_parameter_of_a_tied_model_gets_a_gradient(family: str) -> None:
    # DDP hangs on, or rejects, a parameter without a gradient.
    model = AutoModelForCausalLM.from_config(transformers_config(tiny(family)))
    tokens = torch.randint(0, 99, (1, 32))
    model(input_ids=tokens).logits.logsumexp(-1).sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_rotary_settings_are_the_published_ones() -> None:
    assert transformers_config(NAMED["llama2-7b"]).rope_parameters == {"rope_type": "default", "rope_theta": 10_000.0}
    assert transformers_config(NAMED["llama3.2-1b"]).rope_parameters == {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    assert transformers_config(NAMED["pythia-1b"]).rope_parameters["partial_rotary_factor"] == 0.25


def test_windows_are_the_published_ones() -> None:
    assert transformers_config(NAMED["mistral-7b"]).sliding_window == 4096
    assert transformers_config(NAMED["qwen2.5-7b"]).sliding_window is None
    assert set(transformers_config(NAMED["qwen3-8b"]).layer_types) == {"full_attention"}
    assert transformers_config(tiny("mistral")).sliding_window is None


def test_no_token_id_of_a_foreign_tokenizer_gets_into_explicit_sizes() -> None:
    for family in FAMILY_NAMES:
        config = transformers_config(tiny(family))
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (None, None, None)
    assert transformers_config(NAMED["llama3-8b"]).eos_token_id == 128_001


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_the_config_of_a_saved_model_is_forecast_as_the_shape_it_was_built_from(family: str, tmp_path: Path) -> None:
    shape = tiny(family)
    transformers_config(shape).save_pretrained(tmp_path)
    read = read_shape(ModelConfig.model_validate({"from": str(tmp_path)}))
    # These change nothing that is forecast, and are not read.
    unread = {name: getattr(shape, name) for name in ("norm_eps", "rope_theta", "rotary_share")}
    assert replace(read, **unread) == shape


def test_mpt_shapes_are_for_the_forecast_only() -> None:
    with pytest.raises(UserMistake, match="for the forecast only"):
        transformers_config(NAMED["mpt-7b"])
