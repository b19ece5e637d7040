"""A config.json that describes no model is refused in one sentence, for training as for the forecast."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from tests.harness import settings

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 512}
UNKNOWN = "transformers does not know"


def model_folder(folder: Path, content: object) -> Path:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    (folder / "model" / "model.safetensors").write_bytes(b"")
    return folder / "model"


def run_config(data: Path, model: Path) -> api.Config:
    return api.config_from_mapping(settings(data, model={"from": str(model), "tokenizer": "bytes"}))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({**LLAMA, "rope_parameters": {"rope_type": "odd"}}, rf"rope_parameters\.rope_type is 'odd', which {UNKNOWN}"),
        ({**LLAMA, "rope_scaling": {"rope_type": "odd", "factor": 2}}, rf"rope_type is 'odd', which {UNKNOWN}"),
        ({**LLAMA, "rope_parameters": {"rope_type": "llama3"}}, r"Missing required keys in `rope_parameters`"),
        ({**LLAMA, "hidden_act": "odd"}, rf"hidden_act is 'odd', which {UNKNOWN}"),
        ({**GPT2, "activation_function": "odd"}, rf"activation_function is 'odd', which {UNKNOWN}"),
        ({**LLAMA, "num_attention_heads": 0}, r"num_attention_heads is 0, but must be an integer from 1 to"),
        ({**GPT2, "n_head": 0}, r"n_head is 0, but must be an integer from 1 to"),
        ({**LLAMA, "num_hidden_layers": 0}, r"num_hidden_layers is 0, but must be an integer from 1 to 100000"),
        ({**LLAMA, "num_hidden_layers": -3}, r"num_hidden_layers is -3, but must be"),
        ({**LLAMA, "num_hidden_layers": 10**7}, r"num_hidden_layers is 10000000, but must be"),
        ({**GPT2, "n_layer": -1}, r"n_layer is -1, but must be an integer from 1 to 100000"),
        ({**LLAMA, "hidden_size": "32"}, r"hidden_size is '32', but must be an integer from 1 to"),
        ({**LLAMA, "hidden_size": 10**30}, r"hidden_size is 1000000000000000000000000000000, but must be"),
        ({**LLAMA, "vocab_size": True}, r"vocab_size is True, but must be"),
        ({**LLAMA, "num_key_value_heads": -2}, r"transformers cannot build: RuntimeError: .*negative dimension"),
        ({**LLAMA, "num_key_value_heads": 0}, r"transformers cannot build: ZeroDivisionError: .+"),
        ({**LLAMA, "intermediate_size": 10**30}, r"transformers cannot build: .+"),
        ({**LLAMA, "sliding_window": "wide"}, r"sliding_window is 'wide', but must be an integer"),
        ("[" * 100_000, r"cannot be read as JSON"),
        (f'{{"hidden_size": {"9" * 5000}}}', r"cannot be read as JSON"),
        ("[1]", r"must be a JSON object"),
    ],
    ids=lambda value: str(value)[-60:],
)
def test_a_config_of_no_model_names_what_is_wrong_in_it(
    content: object, says: str, instructions: Path, tmp_path: Path
) -> None:
    config = run_config(instructions, model_folder(tmp_path, content))
    with pytest.raises(UserMistake) as caught:
        api.dry_run(config)
    assert re.search(rf"^\S+/config\.json.*{says}", str(caught.value)), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 0}, r"num_hidden_layers is 0, but must be an integer from 1 to 100000"),
        ({"num_hidden_layers": 10**9}, r"num_hidden_layers is 1000000000, but must be"),
        ({"hidden_size": "32"}, r"hidden_size is '32', but must be"),
        ({"num_key_value_heads": -2}, r"num_key_value_heads is -2, but must be"),
        ({"resid_pdrop": "x"}, r"resid_pdrop is 'x', but must be a number"),
    ],
    ids=str,
)
def test_the_forecast_refuses_it_too(changes: dict[str, Any], says: str, instructions: Path, tmp_path: Path) -> None:
    config = run_config(instructions, model_folder(tmp_path, {**LLAMA, **changes}))
    with pytest.raises(UserMistake, match=says):
        api.plan(config)


def test_a_padding_token_outside_the_vocabulary_is_refused_where_the_model_uses_it(
    instructions: Path, tmp_path: Path
) -> None:
    config = run_config(instructions, model_folder(tmp_path, {**LLAMA, "pad_token_id": 300}))
    with pytest.raises(UserMistake, match=r"/config\.json.*pad_token_id is 300, but the vocabulary has 300 tokens"):
        api.dry_run(config)
