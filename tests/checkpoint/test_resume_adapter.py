"""A run with an adapter resumes bit by bit, on the base that it was started with, from checkpoints of the adapter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from shoal import api
from shoal.mistakes import UserMistake
from tests.checkpoint.cut import column, cut, everything, hold_bitwise
from tests.harness import lines, run_ranks, settings, slow, train_again_on, train_on, weights
from tests.models.small import plain

STEPS, CUT = 4, 2


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    plain(LlamaConfig(vocab_size=260, max_position_embeddings=128, **sizes)).save_pretrained(folder)
    return folder


def config_of(data: Path, base: Path, **changes: Any) -> dict[str, Any]:
    adapter = {"kind": "lora", "rank": 4, "dora": True, "train_also": ["*norm*", "lm_head"]}
    return settings(
        data,
        model={"from": str(base), "tokenizer": "bytes"},
        adapter=adapter,
        **{
            "train__steps": STEPS,
            "train__global_batch": 4,
            "train__micro_batch": 2,
            "data__max_length": 48,
            "data__train_on": "all",
            "checkpoint__every": CUT,
            "checkpoint__keep": 9,
            **changes,
        },
    )


@pytest.fixture(scope="module")
def whole(instructions: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Uninterrupted, on one process and on two."""
    meshes = {1: {}, 2: {"parallel__strategy": "fsdp"}}
    return {
        size: train_again_on(size, config_of(instructions, base, **changes), tmp_path_factory.mktemp("whole"))
        for size, changes in meshes.items()
    }


@pytest.mark.parametrize("size", [1, slow(2)])
def test_a_resumed_adapter_is_the_uninterrupted_one_bit_by_bit(size, whole, base, instructions, tmp_path):
    copy = cut(whole[size], CUT, tmp_path)
    changes = {"parallel__strategy": "fsdp"} if size == 2 else {}
    train_on(size, config_of(instructions, base, **changes), tmp_path, resume=True)
    hold_bitwise(copy, whole[size])


def test_two_ranks_resume_on_one_bit_by_bit(whole, base, instructions, tmp_path):
    copy = cut(whole[2], CUT, tmp_path)
    train_on(1, config_of(instructions, base), tmp_path, resume=True)
    for key in ("step", "loss", "grad_norm", "lr", "tokens"):
        assert column(copy, key) == column(whole[2], key), key
    one, other = weights(copy), weights(whole[2])
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_a_checkpoint_is_as_small_as_its_adapter(whole, base):
    saved = everything(whole[1])
    trained = {name: one for name, one in saved.items() if name.startswith("model.")}
    kinds = {name.split(".")[-2] for name in trained}
    assert kinds >= {"lora_A", "lora_B", "lora_magnitude_vector", "norm", "lm_head"}
    assert "embed_tokens" not in kinds
    assert "q_proj" not in kinds
    parameters = sum(one.numel() for one in trained.values())
    held = sum(one.numel() * one.element_size() for name, one in saved.items() if not name.startswith("random."))
    assert 3 * 4 * parameters <= held < 3 * 4 * parameters + 500  # weights and both moments in fp32, and scalars


def test_another_base_is_refused(whole, base, instructions, tmp_path):
    other = shutil.copytree(base, tmp_path / "base")
    copy = cut(whole[1], CUT, tmp_path)
    for file in (copy / "config.yaml", copy / "base.json"):
        file.write_text(file.read_text().replace(str(base), str(other)))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1e-3
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    config = config_of(instructions, other)
    with pytest.raises(UserMistake, match=r"are not those on which the adapter of .+ was trained: .+ restore"):
        train_on(1, config, tmp_path, resume=True)
    checkpoint = copy / "checkpoints" / f"step-{CUT:08d}"
    with pytest.raises(UserMistake, match=r"are not those on which the adapter of"):
        train_on(1, {**config, "name": "another"}, tmp_path, start_from=checkpoint)
    assert [line["step"] for line in lines(copy)] == list(range(1, CUT + 1))


def test_the_start_says_what_is_trained_and_the_end_what_comes_next(base, instructions, tmp_path, capfd):
    config = api.config_from_mapping(config_of(instructions, base, train__steps=1))
    (text,) = run_ranks(1, lambda: api.train(config, runs=tmp_path).text())
    # Embedding and head 2 × 260 × 32, five norms, and in two blocks seven matrices with their adapters.
    assert "38,688 parameters, of which 12,960 are trained, single" in capfd.readouterr().err
    run = tmp_path / "run"
    assert text.endswith(f"next        shoal merge {run}, or for PEFT: shoal export {run} --adapter")
    recorded = json.loads((run / "base.json").read_text())
    assert (recorded["folder"], recorded["seed"]) == (str(base), None)
