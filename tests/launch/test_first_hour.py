"""What a new user meets in the first hour: defaults that fit small runs, and command lines that can be repeated."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from shoal import api
from tests.harness import settings, slow
from tests.launch.command import forked_shoal, write_config

SHORT = {"data__max_length": 64, "data__train_on": "all"}


def config(data: Path, **changes: Any) -> dict[str, Any]:
    settled = settings(data, **{**SHORT, "train__steps": 2, **changes})
    del settled["train"]["schedule"]
    return settled


def test_a_run_of_few_steps_is_warned_about_with_the_numbers(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, config(instructions, train__steps=None, train__epochs=1, train__global_batch=64))
    seen = forked_shoal(tmp_path, "train", "run.yaml", "train.micro_batch=auto", "--dry-run")
    assert seen.status == 0, seen.err
    said = "the run has only 4 steps: train.epochs 1 of 300 sequences, 64 per step (train.global_batch); "
    assert said + "train.global_batch 2 would give about 128." in seen.err
    assert "warmup" not in seen.err  # by default a share of the run
    # Whoever asks for few steps knows.
    assert (
        "only" not in forked_shoal(tmp_path, "train", "run.yaml", "train.steps=3", "train.epochs=null", "--dry-run").err
    )


@pytest.mark.parametrize(
    ("warmup", "sentence"),
    [
        (100, "train.schedule.warmup 100 is longer than the run and was reduced to its 10 steps"),
        (6, "train.schedule.warmup takes 6 of the run's 10 steps"),
        (0.9, "train.schedule.warmup takes 9 of the run's 10 steps"),
        (5, None),
    ],
)
def test_a_run_that_is_mostly_warmup_is_warned_about(
    warmup: float, sentence: str | None, instructions: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, config(instructions, train__steps=10))
    seen = forked_shoal(tmp_path, "train", "run.yaml", f"train.schedule.warmup={warmup}", "--dry-run")
    assert seen.status == 0, seen.err
    assert (sentence in seen.err) if sentence else ("warmup" not in seen.err)


def test_resume_auto_starts_resumes_and_finds_the_run_finished(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, config(instructions))
    command = ("train", "run.yaml", "--resume", "auto", "--runs", "scratch", "--json")
    first = forked_shoal(tmp_path, *command)
    assert first.status == 0, first.err
    assert json.loads(first.out)["run"] == "scratch/run"
    assert "Resuming" not in first.err
    assert not (tmp_path / "runs").exists()
    assert api.load_config(tmp_path / "scratch" / "run" / "config.yaml").run_dir == "scratch"
    longer = forked_shoal(tmp_path, *command, "train.steps=3")
    assert "Resuming after step 2 from scratch/run/checkpoints/step-00000002." in longer.err
    assert json.loads(longer.out)["step"] == 3
    again = forked_shoal(tmp_path, *command, "train.steps=3")
    assert again.status == 0
    assert "The run is finished: scratch/run/checkpoints/step-00000003 is step 3 of 3." in again.err
    assert json.loads(again.out)["step"] == 3
    # A plain --resume, wherever it stands, still needs a run.
    for arguments in (("--resume", "run.yaml"), ("run.yaml", "--resume")):
        refused = forked_shoal(tmp_path, "train", *arguments, "run_dir=elsewhere")
        assert refused.status == 2
        assert "--resume: there is no run in elsewhere/run" in refused.err


def test_sharding_without_a_strategy_means_fsdp(tmp_path: Path) -> None:
    shape = {"model": {"shape": "gpt2"}}
    assert api.config_from_mapping({**shape, "parallel": {"sharding": "shard_grad_op"}}).parallel.strategy == "fsdp"
    assert api.config_from_mapping({**shape, "parallel": {"tp": 2}}).parallel.strategy == "auto"
    # A saved config has every key, and stays what it was.
    kept = api.config_values(api.config_from_mapping(shape))
    assert api.config_from_mapping(kept).parallel.strategy == "auto"


def test_the_starred_row_of_a_plan_is_its_headline(tmp_path: Path) -> None:
    asked = ["model.shape=llama3-8b", "hardware.gpu=a100-80gb", "hardware.devices=8", "train.micro_batch=2"]
    seen = forked_shoal(tmp_path, "plan", *asked)
    (starred,) = [line for line in seen.out.splitlines() if line.startswith("* ")]
    assert "micro-batch 2, " in seen.out.splitlines()[1]
    assert starred.split()[-2:] == ["2", "none"]
    found = json.loads(forked_shoal(tmp_path, "plan", *asked, "--json").out)
    assert round(found["memory"]["reserved_gib"], 2) in [one["reserved_gib"] for one in found["alternatives"]]


def test_a_plan_says_what_train_does_not_accept_yet(tmp_path: Path) -> None:
    asked = ["model.shape=llama3-8b", "hardware.gpu=rtx4090", "train.global_batch=8"]
    seen = forked_shoal(tmp_path, "plan", *asked)
    assert seen.status == 3
    assert [line for line in seen.out.splitlines() if "adapter.kind=" in line]
    assert "does not accept" not in seen.out
    wanted = forked_shoal(tmp_path, "plan", *asked, "train.compile=thunder")
    assert "shoal train does not accept this yet: train.compile thunder is not built yet." in wanted.out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--devices", "2"), "--devices is not an option of shoal train: hardware.devices takes the devices per node"),
        (("--learning-rate=1",), "train.lr sets the peak learning rate. Add train.lr=VALUE."),
        (("--out_dir", "x"), "run_dir sets the folder for runs"),
        (("--train.steps=3",), "--train.steps is not an option: overrides have no dashes; write train.steps=3."),
        (("--train.steps", "3"), "--train.steps is not an option: overrides have no dashes; write train.steps=3."),
        (("--seed",), "--seed is not an option: overrides have no dashes; write seed=VALUE."),
        (("--config", "run.yaml"), "--config is not an option: the file is an argument, shoal train FILE."),
    ],
)
def test_an_option_of_another_tool_is_answered_with_ours(
    arguments: tuple[str, ...], sentence: str, instructions: Path, tmp_path: Path
) -> None:
    write_config(tmp_path, config(instructions))
    seen = forked_shoal(tmp_path, "train", "run.yaml", *arguments)
    assert (seen.status, seen.out) == (2, "")
    assert sentence in seen.err
    assert seen.err.count("\n") == 1


@pytest.mark.parametrize("dry", [[], slow(["--dry-run"])])
def test_quick_mistakes_are_found_before_torch_is_imported(dry: list[str], instructions: Path, tmp_path: Path) -> None:
    mistakes = {
        "data.path=nowhere.jsonl": "data.path nowhere.jsonl does not exist",
        "data.path=odd.jsonl": "data.format auto does not recognize",
        "model={shape: null, from: no/such-model}": "shoal download no/such-model",
        "name=begun": "runs/begun already holds a run; add --resume",
        "--resume": "--resume: there is no run in runs/run; start it without --resume.",
        "shoal export runs/bgeun": "There is no run runs/bgeun. Did you mean runs/begun?",
        "shoal generate nowhere text": "There is no run nowhere. Give the folder of one, such as runs/NAME.",
    }
    (tmp_path / "odd.jsonl").write_text('{"question": "?", "reply": "!"}\n')
    file = write_config(tmp_path, config(instructions))
    if dry:  # writes nothing, so that it may be where a run is
        mistakes = {mistake: says for mistake, says in mistakes.items() if mistake.startswith(("data.", "model="))}
    (tmp_path / "runs" / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "begun" / "config.yaml").write_text(file.read_text())
    (tmp_path / "runs" / "begun" / "metrics.jsonl").write_text("{}\n")
    code = (
        "import sys; from shoal.cli import main\n"
        f"for override in {list(mistakes)!r}:\n"
        f"    sys.argv = ['shoal', 'train', {str(file)!r}, override, *{dry!r}]\n"
        "    if override.startswith('shoal '): sys.argv = override.split()\n"
        "    try: main()\n"
        "    except SystemExit as ended: assert ended.code == 2\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, (override, heavy)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    said = ended.stderr.splitlines()
    assert len(said) == len(mistakes)
    assert all(sentence in line for sentence, line in zip(mistakes.values(), said, strict=True)), said


def test_tensor_parallelism_is_not_chosen_where_fsdp_fits_and_a_plan_needs_no_data() -> None:
    asked = ["model.shape=llama3-8b", "hardware.gpu=a100-40gb", "hardware.devices=8", "data.source=json"]
    found = api.plan(api.load_config(None, asked, planned=True)).choice
    assert (found.fits, found.name) == (True, "fsdp")


def test_an_encoder_is_refused_unless_it_is_trained_as_one(instructions: Path, tmp_path: Path) -> None:
    shape = {"family": "bert", "hidden": 32, "layers": 2, "heads": 4, "vocab": 260}
    write_config(tmp_path, config(instructions, model__shape=shape))
    seen = forked_shoal(tmp_path, "train", "run.yaml")
    assert (seen.status, seen.out) == (2, "")
    assert "model.shape is a bert, an encoder, in which every token would attend to its own label" in seen.err
    planned = forked_shoal(tmp_path, "plan", "run.yaml", "hardware.gpu=h100-80gb", "train.objective=masked_lm")
    assert planned.status == 0
    CONFIG_MAPPING["roberta"](hidden_size=32, num_attention_heads=4, vocab_size=260).save_pretrained(
        tmp_path / "encoder"
    )
    seen = forked_shoal(tmp_path, "train", "run.yaml", "model={shape: null, from: encoder}")
    assert seen.status == 2
    assert " is an encoder, in which every token would attend to its own label" in seen.err


def test_accumulation_steps_are_another_way_to_set_the_global_batch(instructions: Path, tmp_path: Path) -> None:
    settled = config(instructions, train__micro_batch=2, train__grad_accum=3)
    del settled["train"]["global_batch"]
    write_config(tmp_path, settled)
    batch = "batch      12 sequences per step: micro-batch 2, 3 accumulation steps"
    mesh = ("hardware.devices=4", "parallel.tp=2")
    shown = forked_shoal(tmp_path, "train", "run.yaml", *mesh, "train.recompute=cheap", "--dry-run")
    assert batch in shown.out
    assert "strategy   ddp × tp 2 (" in shown.out
    assert "warning: train.recompute cheap has no effect" in shown.err
    # Both may be given, if they agree; the run keeps its global batch, whatever it is resumed on.
    trained = forked_shoal(tmp_path, "train", "run.yaml", "train.global_batch=6", "--json")
    assert trained.status == 0, trained.err
    kept = api.load_config(tmp_path / "runs" / "run" / "config.yaml").train
    assert (kept.global_batch, kept.grad_accum) == (6, None)
    refused = forked_shoal(tmp_path, "train", "run.yaml", "train.global_batch=8", "--dry-run")
    assert refused.status == 2
    assert "micro_batch 2 × grad_accum 3 × 1 data-parallel device = 6; leave one of them out." in refused.err
    assert "as a number" in forked_shoal(tmp_path, "train", "run.yaml", "train.micro_batch=auto", "--dry-run").err
    planned = forked_shoal(tmp_path, "plan", "run.yaml", "hardware.gpu=h100-80gb", "hardware.devices=4", "--json")
    assert json.loads(planned.out)["chosen"]["global_batch"] == 24


def test_the_help_begins_with_what_one_does_first(tmp_path: Path) -> None:
    said = forked_shoal(tmp_path, "--help").out
    places = [said.index(f"\n  {name} ") for name in ("init", "plan", "train", "top", "generate", "export")]
    assert places == sorted(places)
    assert "Begin with: shoal init" in said
