"""A run's history: one branch, one writer, one dataset."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.config.run import RunDirectory
from shoal.mistakes import UserMistake
from tests.harness import lines, settings, slow, train_again_on, train_on


def steps(run: Path) -> list[str]:
    return sorted(folder.name for folder in (run / "checkpoints").iterdir() if folder.is_dir())


def test_resuming_from_an_older_checkpoint_sets_the_later_ones_aside(instructions, tmp_path):
    config = settings(instructions, train__steps=4, checkpoint={"every": 1, "keep": 9})
    run = train_again_on(2, config, tmp_path)
    assert steps(run) == ["step-00000001", "step-00000002", "step-00000003", "step-00000004"]
    config["checkpoint"] = {"every": 3, "keep": 1}
    train_on(2, config, tmp_path, resume=True, start_from=run / "checkpoints" / "step-00000002")
    assert steps(run) == ["abandoned-00000003", "abandoned-00000004", "step-00000004"]
    assert (run / "checkpoints" / "latest").read_text().strip() == "step-00000004"


def test_overwriting_a_run_with_its_own_checkpoint_is_refused_and_loses_nothing(instructions, tmp_path):
    config = settings(instructions, train__steps=2)
    run = train_again_on(1, config, tmp_path)
    with pytest.raises(UserMistake, match=r"--overwrite would delete .+ which --from names"):
        train_on(1, config, tmp_path, overwrite=True, start_from=run / "checkpoints" / "step-00000002")
    assert steps(run) == ["step-00000002"]


def test_a_second_process_is_kept_out_of_a_live_run(instructions, tmp_path):
    config = settings(instructions, train__steps=2)
    run = train_again_on(1, config, tmp_path)
    with (
        RunDirectory(run).held(),
        pytest.raises(UserMistake, match="Another process is training in"),
    ):
        train_on(1, config, tmp_path, resume=True)


@pytest.fixture(scope="module")
def trained_on_lines(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and its data: training examples, and others for validation."""
    folder = tmp_path_factory.mktemp("lines")
    examples = instructions.read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(examples[:40]))
    (folder / "validation.jsonl").write_text("".join(examples[40:60]))
    train_again_on(1, on_lines(folder), folder)
    return folder


def on_lines(folder: Path, **changes: Any) -> dict[str, Any]:
    sets = {"data__validation": str(folder / "validation.jsonl"), "eval__every": 9, "log__to": ["csv"]}
    return settings(folder / "train.jsonl", train__steps=2, **sets, **changes)


def rewrite(file: Path, change: Callable[[list[str]], list[str]]) -> None:
    file.write_text("".join(change(file.read_text().splitlines(keepends=True))))


OTHER_CONTENTS = "as many documents, tokens and sequences as before, but other contents"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("train", lambda lines: lines[::-1], f"the training set has {OTHER_CONTENTS}"),
        (
            "train",
            lambda lines: [line.replace("water", "ocean") for line in lines],
            f"training set has {OTHER_CONTENTS}",
        ),
        ("validation", lambda lines: lines[::-1], f"the validation set has {OTHER_CONTENTS}"),
        ("train", lambda lines: lines[:30], "the training set had 40 documents and has 30 now"),
    ],
    ids=["reversed", "a word replaced", "validation reversed", "shortened"],
)
def test_resuming_on_data_that_has_changed_is_refused(name, change, says, trained_on_lines, tmp_path):
    folder = shutil.copytree(trained_on_lines, tmp_path / "copy")
    before = (folder / "run" / "config.yaml").read_text()
    rewrite(folder / f"{name}.jsonl", change)
    with pytest.raises(
        UserMistake, match=f"--resume: the data has changed since the run started: .*{says}; restore it"
    ):
        train_on(1, on_lines(folder), folder, resume=True)
    assert (folder / "run" / "config.yaml").read_text() == before


def test_a_run_resumes_on_the_same_data_in_files_that_were_touched_or_moved(trained_on_lines, tmp_path):
    folder = shutil.copytree(trained_on_lines, tmp_path / "copy")  # which moves them
    os.utime(folder / "train.jsonl", (1, 1))
    config = on_lines(folder)
    config["train"]["steps"] = 3
    run = train_on(1, config, folder, resume=True)
    assert steps(run) == ["step-00000002", "step-00000003"]


@pytest.mark.parametrize("rest", [b'{"step": 3, "attempt": 0, "lo', b"\xff\x00", b"7"], ids=["json", "bytes", "number"])
def test_a_line_of_metrics_that_was_cut_does_not_swallow_the_next(rest, trained_on_lines, tmp_path):
    folder = shutil.copytree(trained_on_lines, tmp_path / "copy")
    run = folder / "run"
    before = {name: (run / name).read_bytes() for name in ("metrics.jsonl", "metrics.csv", "evaluation.csv")}
    for name, whole in before.items():
        (run / name).write_bytes(whole + rest)
    config = on_lines(folder)
    config["train"]["steps"] = 3
    train_on(1, config, folder, resume=True)
    for name, whole in before.items():
        assert (run / name).read_bytes().startswith(whole + rest + b"\n")
    after = (run / "metrics.jsonl").read_bytes()[len(before["metrics.jsonl"] + rest) :]
    assert [(line["step"], line["attempt"]) for line in map(json.loads, after.splitlines()[1:])] == [(3, 1), (3, 1)]
    assert (run / "metrics.csv").read_bytes().splitlines()[-1].startswith(b"3,1,")


def test_a_run_or_checkpoint_cannot_be_resumed_with_another_optimizer(instructions, tmp_path):
    run = train_again_on(1, settings(instructions, train__steps=2), tmp_path)
    other = settings(instructions, train__steps=4, train__optimizer={"name": "sgd"})
    with pytest.raises(UserMistake, match=r"train\.optimizer\.name was 'adamw'"):
        train_on(1, other, tmp_path, resume=True)
    with pytest.raises(UserMistake, match="holds the optimizer state of adamw, which sgd cannot use"):
        train_on(1, other | {"name": "fresh"}, tmp_path, start_from=run / "checkpoints" / "step-00000002")


def test_resuming_a_finished_run_still_knows_its_loss(instructions, tmp_path):
    config = settings(instructions, train__steps=2)
    run = train_again_on(1, config, tmp_path)
    train_on(1, config, tmp_path, resume=True)
    progress = json.loads((run / "checkpoints" / "step-00000002" / "progress.json").read_text())
    assert progress["loss"] == lines(run)[-1]["loss"]


def test_quantized_weights_are_refused(instructions, tmp_path):
    sizes = LlamaConfig(
        vocab_size=260, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    LlamaForCausalLM(sizes).save_pretrained(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, file, metadata={"format": "pt"})
    config = settings(instructions)
    config["model"] = {"from": str(tmp_path / "model"), "tokenizer": "bytes"}
    with pytest.raises(UserMistake, match="as F8_E4M3"):
        train_on(1, config, tmp_path)
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    described["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "model" / "config.json").write_text(json.dumps(described))
    with pytest.raises(UserMistake, match="quantized weights"):
        train_on(1, config | {"name": "two"}, tmp_path)


@pytest.mark.parametrize("module", [slow("shoal.launch.run"), slow("shoal.use.load"), "shoal.data.tokenizer"])
def test_the_hugging_face_libraries_are_offline_wherever_shoal_imports_them(module):
    """huggingface_hub reads the environment once, when it is imported."""
    code = (
        "import os, sys; os.environ.pop('HF_HUB_OFFLINE', None)\n"
        "class First:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'transformers': import huggingface_hub\n"
        "        if name != 'huggingface_hub': return\n"
        "        sys.meta_path.remove(self)\n"
        "        from huggingface_hub import constants\n"
        "        print(constants.HF_HUB_OFFLINE, flush=True); os._exit(0)\n"
        f"sys.meta_path.insert(0, First()); import {module}, transformers"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True"
