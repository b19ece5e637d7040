"""Model folders that are not what their config.json says, and models whose documents cannot be packed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.harness import lines, settings
from tests.launch.command import forked_shoal, write_config

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 260, "pad_token_id": 0}
LLAMA = {**SIZES, "intermediate_size": 48, "num_attention_heads": 4, "tie_word_embeddings": True}


def saved(folder: Path, model_type: str, **sizes: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**sizes))
    model.save_pretrained(folder / "model")
    return folder / "model"


def start(folder: Path, data: Path, *overrides: str, **changes: Any) -> Any:
    model = {"from": "model", "tokenizer": "bytes"}
    write_config(folder, settings(data, model=model, train__steps=1, data__train_on="all", **changes))
    return forked_shoal(folder, "train", "run.yaml", *overrides)


def rewrite(model: Path, **tensors: torch.Tensor) -> None:
    file = model / "model.safetensors"
    save_file({**load_file(file), **{name.replace("__", "."): one for name, one in tensors.items()}}, file)


def test_stored_weights_that_the_config_does_not_describe_are_refused(instructions, tmp_path):
    described = saved(tmp_path, "llama", **LLAMA) / "config.json"
    described.write_text(json.dumps({**json.loads(described.read_text()), "num_hidden_layers": 1}))
    seen = start(tmp_path, instructions)
    assert (seen.status, seen.out) == (2, "")
    assert "model holds model.layers.1.input_layernorm.weight and 8 more, which LlamaForCausalLM does not" in seen.err
    assert not (tmp_path / "runs").exists()


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(instructions, tmp_path):
    rewrite(saved(tmp_path, "llama", **LLAMA), lm_head__weight=torch.ones(260, 32))
    seen = start(tmp_path, instructions)
    assert seen.status == 2
    assert "lm_head.weight that differs from model.embed_tokens.weight" in seen.err


def test_stored_tensors_that_every_model_recomputes_are_not_missed(instructions, tmp_path):
    model = saved(tmp_path, "llama", **LLAMA)
    table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
    frequencies = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    rewrite(model, lm_head__weight=table.clone(), **frequencies)
    seen = start(tmp_path, instructions)
    assert seen.status == 0, seen.err


@pytest.mark.parametrize(
    ("model_type", "sizes", "reason"),
    [
        ("mamba", {**SIZES, "state_size": 4}, "its recurrent or convolutional state"),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 260}, "its attention takes no mask"),
    ],
)
def test_documents_are_packed_only_where_the_model_keeps_them_apart(model_type, sizes, reason, instructions, tmp_path):
    saved(tmp_path, model_type, **sizes)
    seen = start(tmp_path, instructions, data__pack="auto")
    assert seen.status == 0, seen.err
    assert f"data.pack auto: one document per sequence, because {model_type} cannot keep documents apart: " in seen.err
    alone = lines(tmp_path / "runs" / "run")[0]["loss"]
    seen = start(tmp_path, instructions, "data.pack=true", "--overwrite")
    assert seen.status == 2
    assert f"data.pack is true, but {model_type} cannot keep documents apart: {reason}" in seen.err
    assert "set data.pack: false" in seen.err
    assert start(tmp_path, instructions, "data.pack=false", "--overwrite").status == 0
    assert lines(tmp_path / "runs" / "run")[0]["loss"] == alone


def test_plain_text_is_packed_for_every_model(tmp_path):
    saved(tmp_path, "mamba", **SIZES, state_size=4)
    (tmp_path / "text.txt").write_text("Fish swim in the sea.\n\n" * 200)
    seen = start(tmp_path, tmp_path / "text.txt", data__pack=True)
    assert seen.status == 0, seen.err
