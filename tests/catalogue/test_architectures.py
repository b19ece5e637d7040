"""Parameter counts of shapes by name and of any config.json, compared with transformers' own on the meta device."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.catalogue.architectures import ARCHITECTURES
from shoal.catalogue.forecast_families import CODE_FROM_HUB
from shoal.catalogue.shapes import NAMED, ModelShape, parameters
from shoal.mistakes import UserMistake
from shoal.models.families import transformers_config
from tests.catalogue.forecast_only import counted
from tests.plan.planning import plan

FORECAST_ONLY = [name for name, shape in NAMED.items() if not shape.is_family and shape.traits.buildable]
# One of each architecture, with all its layers.
ONE_OF_EACH = list({NAMED[name].model_type: name for name in reversed(FORECAST_ONLY)}.values())
MIXTURE = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 128, "num_experts_per_tok": 8},
    "deepseek_v3": {
        "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "intermediate_size": 18_432, "head_dim": 64,
    },
}  # fmt: skip


def config_of(shape: ModelShape) -> Any:
    """Its transformers config, with other sizes than the shape's where it is a mixture of experts."""
    from transformers import AutoConfig

    settings: dict[str, Any] = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.positions,
        "tie_word_embeddings": shape.tied,
        "pad_token_id": None,
    }
    mixture = MIXTURE.get(shape.model_type, {})
    if shape.model_type in ("mixtral", "qwen3_moe"):
        width = shape.ffn // mixture["num_experts_per_tok"]
        settings |= {"intermediate_size": width, "moe_intermediate_size": width}
    return AutoConfig.for_model(shape.model_type, **{**settings, **mixture})


@pytest.mark.parametrize("name", FORECAST_ONLY)
def test_a_config_json_has_the_shape_of_its_name_without_torch(name: str, tmp_path: Path) -> None:
    shape = NAMED[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of(shape).to_dict()))
    by_file = plan(f"model.from={tmp_path}", "hardware.gpu=h200", "parallel.strategy=single").choice.run.shape
    assert parameters(by_file) == parameters(shape)
    same = ("family", "hidden", "layers", "heads", "kv_heads", "ffn", "head_size", "vocab", "tied", "others", "latent")
    assert {key: getattr(by_file, key) for key in same} == {key: getattr(shape, key) for key in same}


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_parameters_are_those_of_transformers(name: str) -> None:
    shape = NAMED[name]
    # Where layers differ, the shape has their mean, rounded down.
    assert 0 <= counted(config_of(shape)) - parameters(shape) < (shape.layers if shape.latent else 1)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES.keys() - {*CODE_FROM_HUB}))
def test_every_architecture_is_counted_from_its_config_alone(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    experts = {"moe_intermediate_size": 32, "num_experts": 8, "n_routed_experts": 8, "num_local_experts": 8}
    config = AutoConfig.for_model(model_type, **sizes, intermediate_size=96, vocab_size=128, pad_token_id=None)
    for key, value in experts.items():
        if getattr(config, key, None) is not None:
            setattr(config, key, value)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = plan(f"model.from={tmp_path}", "hardware.gpu=h200", "data.max_length=64")
    assert found.as_dict()["model"]["parameters"] == pytest.approx(counted(config), abs=4)
    assert not any("not known" in note for note in found.notes)


def test_an_unknown_architecture_is_forecast_with_a_sentence(tmp_path: Path) -> None:
    settings = {"model_type": "newest", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "vocab_size": 128, "intermediate_size": 96}))
    notes = plan(f"model.from={tmp_path}", "hardware.gpu=h200", "data.max_length=64").notes
    assert [note for note in notes if "newest" in note] == [
        "The architecture newest is not known: it is forecast as a llama of the sizes in config.json, and its number "
        "of parameters may differ."
    ]


def test_a_shape_that_is_only_forecast_is_not_built_as_another() -> None:
    for name in FORECAST_ONLY:
        with pytest.raises(UserMistake, match="are for the forecast only: train such a model from a folder"):
            transformers_config(NAMED[name])
    with pytest.raises(UserMistake, match=r"model\.shape gemma2-2b is only forecast: train a gemma2 from a folder"):
        api.load_config(None, ["model.shape=gemma2-2b"])
    assert any("model.shape gemma2-2b is only forecast" in one for one in plan("model.shape=gemma2-2b").notes)


def test_a_mixture_computes_with_its_active_experts_only() -> None:
    mixture = plan("model.shape=qwen3-30b-a3b", "hardware.gpu=h200", "hardware.devices=8", "train.recompute=auto")
    dense = plan("model.shape=qwen3-32b", "hardware.gpu=h200", "hardware.devices=8", "train.recompute=auto")
    assert mixture.choice.speed.tokens_per_second_per_gpu > 4 * dense.choice.speed.tokens_per_second_per_gpu
    held = [one.as_dict()["memory"]["terms"]["optimizer state"] for one in (mixture, dense)]
    assert held[0] == pytest.approx(held[1] * 30.5 / 32.8, rel=0.01)
