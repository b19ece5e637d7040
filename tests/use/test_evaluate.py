"""`shoal eval` computes the loss that training logged, and can evaluate other data."""

import json
import math
import random
from pathlib import Path

import pytest

from shoal import api
from shoal.use.evaluate import Evaluation
from tests.harness import PYTHIA, settings, train_again_on


def trained_lines(run: Path) -> dict[int, dict]:
    found = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in found if "eval_loss" in line}


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("step", [2, 4])
def test_the_loss_equals_the_one_logged_by_training_at_that_step(strategy, step, text_runs, shoal):
    found = shoal("eval", text_runs[strategy], "--step", step, "--batches", 2, "--json").json
    line = trained_lines(text_runs[strategy])[step]
    assert found["eval_loss"] == pytest.approx(line["eval_loss"], rel=1e-6)
    assert found["eval_perplexity"] == pytest.approx(line["eval_perplexity"], rel=1e-5)
    assert {key: found[key] for key in ("run", "step", "sequences")} == {
        "run": str(text_runs[strategy]),
        "step": step,
        "sequences": 16,
    }


def test_packed_instructions_in_bf16_too(instruction_run, shoal):
    found = shoal("eval", instruction_run, "--json").json
    assert found["eval_loss"] == pytest.approx(trained_lines(instruction_run)[4]["eval_loss"], rel=1e-6)
    exact = shoal("eval", instruction_run, "train.precision=32-true", "--json").json
    assert exact["eval_loss"] != found["eval_loss"]
    assert exact["eval_loss"] == pytest.approx(found["eval_loss"], rel=1e-2)


@pytest.mark.slow
def test_an_fp8_run_is_evaluated_with_the_matmuls_it_was_trained_with(text, tmp_path, shoal):
    config = settings(text, train__steps=2, train__precision="fp8", data__validation=0.05)
    run = train_again_on(1, config, tmp_path)
    found = shoal("eval", run, "--batches", 50, "--json").json
    assert found["eval_loss"] == pytest.approx(trained_lines(run)[2]["eval_loss"], rel=1e-6)
    assert (
        shoal("eval", run, "train.precision=bf16-mixed", "--batches", 50, "--json").json["eval_loss"]
        != found["eval_loss"]
    )


@pytest.mark.slow
def test_another_family_is_evaluated_the_same(text, tmp_path, shoal):
    shape = {**PYTHIA, "positions": 256, "tied": False}
    run = train_again_on(2, settings(text, train__steps=2, data__validation=0.05, model__shape=shape), tmp_path)
    found = shoal("eval", run, "--batches", 50, "--json").json
    assert found["eval_loss"] == pytest.approx(trained_lines(run)[2]["eval_loss"], rel=1e-6)
    asked = ("def ", "--temperature", 0, "--tokens", 20, "--json")
    exported = api.export(run, tmp_path / "hf")
    assert shoal("generate", run, *asked).json["text"] == shoal("generate", exported, *asked).json["text"]


def test_all_held_out_sequences_are_evaluated_unless_batches_is_given(text_run, shoal):
    every = shoal("eval", text_run, "--json").json
    assert every["sequences"] > 16
    assert every["tokens"] > shoal("eval", text_run, "--batches", 1, "--json").json["tokens"]
    smaller = shoal("eval", text_run, "train.micro_batch=1", "--json").json
    assert smaller["eval_loss"] == pytest.approx(every["eval_loss"], rel=1e-6)
    said = shoal("eval", text_run).out
    assert said == (
        f"{text_run}, step 4: loss {every['eval_loss']:.4f}, perplexity {every['eval_perplexity']:.4f} "
        f"({every['tokens']:,} loss tokens in {every['sequences']:,} sequences)\n"
    )


def test_other_data_is_evaluated_completely(text_run, tmp_path, shoal):
    source = random.Random(0)
    other = tmp_path / "noise.txt"
    other.write_text("".join(chr(source.randrange(33, 127)) for _ in range(1919)))
    found = shoal("eval", text_run, f"data.path={other}", "--json").json
    assert found["sequences"] == math.ceil(1919 / 96)
    assert shoal("eval", text_run, f"data={other}", "--json").json == found
    assert found["eval_loss"] > shoal("eval", text_run, "--json").json["eval_loss"]
    half = shoal("eval", text_run, f"data.path={other}", "data.validation=0.5", "--json").json
    assert half["sequences"] == math.ceil(found["sequences"] / 2)


def test_a_nan_loss_is_null():
    found = Evaluation("runs/x", 1, {"loss": math.nan, "perplexity": math.inf}, 5, 1)
    assert json.dumps(found.as_dict(), allow_nan=False)
    assert found.as_dict()["eval_loss"] is found.as_dict()["eval_perplexity"] is None


def test_each_mistake_is_one_sentence(text_run, tmp_path, shoal):
    shoal("eval", text_run, "train.lr=1").hold_mistake("train.lr has no effect on an evaluation")
    shoal("eval", text_run, "eval.batches=3").hold_mistake("use --batches")
    shoal("eval", text_run, "train.lrr=1").hold_mistake("train.lrr")
    shoal("eval", text_run, "data.max_length=600").hold_mistake("512 positions")
    shoal("eval", text_run, "data.validation=0").hold_mistake("has no held-out data", "data.path=FILE")
    shoal("eval", text_run, "data.path=nowhere.txt").hold_mistake("nowhere.txt does not exist")
    shoal("eval", text_run, "--step", 7).hold_mistake("no complete checkpoint of step 7")
    shoal("eval", tmp_path / "nothing").hold_mistake("There is no run")
    exported = api.export(text_run, tmp_path / "hf")
    shoal("eval", exported).hold_mistake("has no held-out data; give the run it was exported from")
