"""A model sharded over four ranks by `shoal train` is exported by `shoal export` as one that transformers loads."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.harness import settings, weights
from tests.launch.command import forked_shoal, write_config


@pytest.mark.slow
def test_a_sharded_model_is_exported_as_a_complete_one(instructions, tmp_path):
    shape = {"family": "gpt2", "hidden": 32, "layers": 4, "heads": 4, "vocab": 259, "positions": 256}
    write_config(tmp_path, settings(instructions, model__shape=shape, train__steps=2, checkpoint__every=1))
    sharded = ["hardware.devices=4", "parallel.tp=2", "parallel.pp=2", "train.micro_batch=2"]
    ended = forked_shoal(tmp_path, "train", "run.yaml", *sharded, "--json")
    assert ended.status == 0, ended.err
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "plan.json").read_text())["chosen"]["mesh"] == {
        "pp": 2, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 2,
    }  # fmt: skip
    otherwise = ["hardware.devices=2", "parallel.strategy=zero1", "train.steps=3", "train.micro_batch=2"]
    resumed = forked_shoal(tmp_path, "train", "run.yaml", *otherwise, "--resume", "--json")
    assert resumed.status == 0, resumed.err
    assert forked_shoal(tmp_path, "export", "runs/run", "--to", "hf").status == 0
    model = AutoModelForCausalLM.from_pretrained(run / "hf")
    held = weights(run)
    assert all(torch.equal(parameter, held[name]) for name, parameter in model.named_parameters())
