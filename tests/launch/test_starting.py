"""The first commands of a new user: init, train --dry-run, download."""

import json
import re
from pathlib import Path

import pytest
import yaml

from shoal.catalogue.recipes import recipe_names
from shoal.config import load_config
from shoal.observe.progress import duration, format_metrics
from shoal.train.preview import draw
from tests.harness import settings
from tests.launch.command import environment, forked_shoal, shoal, write_config


def test_init_lists_recipes_and_writes_one_as_a_commented_file(tmp_path: Path) -> None:
    listed = forked_shoal(tmp_path, "init")
    assert listed.status == 0
    assert re.search(r"^pretrain-text  +Pretrain a small model from scratch on text files\.$", listed.out, re.MULTILINE)
    assert json.loads(forked_shoal(tmp_path, "init", "--json").out)["recipes"].keys() == set(recipe_names())
    assert forked_shoal(tmp_path, "init", "pretrain-text").status == 0
    written = (tmp_path / "pretrain-text.yaml").read_text()
    assert written.startswith("# Pretrain a small model")
    assert yaml.safe_load(written)["model"]["tokenizer"] == "bytes"


def test_init_never_writes_over_a_file_and_names_the_nearest_recipe(tmp_path: Path) -> None:
    (tmp_path / "pretrain-text.yaml").write_text("mine")
    forked_shoal(tmp_path, "init", "pretrain-text").hold_mistake(
        "pretrain-text.yaml already exists; choose another name with --output."
    )
    assert (tmp_path / "pretrain-text.yaml").read_text() == "mine"
    assert "Did you mean pretrain-text" in forked_shoal(tmp_path, "init", "pretrain-txt").err


@pytest.mark.parametrize("name", recipe_names())
def test_every_recipe_is_a_config_that_loads_once_its_open_keys_are_given(name: str, tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "recipes" / f"{name}.yaml"
    content = recipe.read_text()
    open_keys = [
        f"{block}.{key}=given"
        for block, keys in yaml.safe_load(content).items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if value == "???"
    ]
    assert load_config(recipe, open_keys).name == name
    assert content.startswith("# "), "the first line says what the recipe does"


def test_a_dry_run_shows_what_would_happen_and_leaves_nothing_behind(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions, train__global_batch=24, train__micro_batch=4, train__steps=40))
    seen = forked_shoal(tmp_path, "train", "run.yaml", "--dry-run", "hardware.devices=2", "parallel.strategy=fsdp")
    assert seen.status == 0, seen.err
    assert "31,520 parameters" in seen.out
    assert "strategy   fsdp (set in the config) on 2 devices" in seen.out
    assert "batch      24 sequences per step: micro-batch 4, 3 accumulation steps" in seen.out
    assert "40 steps" in seen.out
    assert "3.00e-03 " in seen.out
    # Prompts do not count in the loss, answers and their end token do.
    sample = seen.out.split("between ⟦ and ⟧")[1]
    prompt, answer = sample.split("⟦")
    assert prompt.strip()
    assert answer.split("⟧")[0].endswith("<|end|>")
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_as_json_has_the_same_figures(instructions: Path, tmp_path: Path) -> None:
    write_config(tmp_path, settings(instructions, train__steps=6))
    found = json.loads(forked_shoal(tmp_path, "train", "run.yaml", "--dry-run", "--json").out)
    assert (found["parameters"], found["strategy"], found["grad_accum_steps"], found["steps"]) == (
        31520,
        "single",
        2,
        6,
    )
    assert found["learning_rates"][0] == pytest.approx(1.5e-3)
    assert len(found["learning_rates"]) == 6


def test_download_says_in_a_sentence_that_it_could_not(tmp_path: Path) -> None:
    forked_shoal(tmp_path, "download", "nothing").hold_mistake(
        "nothing is not an id of the Hugging Face hub; write owner/name, or the name of a model that shoal knows: "
        "smollm2-135m."
    )
    # A proxy without a listener simulates a machine without a network.
    unplugged = environment(tmp_path, HTTPS_PROXY="http://127.0.0.1:9", HTTP_PROXY="http://127.0.0.1:9")
    ended = shoal(tmp_path, "download", "--dataset", "nobody/nothing", env=unplugged)
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.startswith("shoal: nobody/nothing could not be downloaded (")
    assert ended.err.count("\n") == 1


def test_a_text_plot_is_as_high_as_its_values() -> None:
    drawn = draw([0.0, 0.5, 1.0], 3)
    assert [line[9:] for line in drawn[:-1]] == ["  █"] * 4 + [" ██"] * 4
    assert drawn[-1].split() == ["step", "1", "step", "3"]


def test_durations_and_metrics_are_short_and_name_non_finite_values() -> None:
    assert [duration(seconds) for seconds in (4.4, 75, 7325)] == ["4s", "1m 15s", "2h 02m"]
    line = {"step": 5, "loss": None, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 1234.0, "mfu": None}
    said = format_metrics({**line, "memory_gib": 1.5, "seconds": 2.0}, 10)
    assert said == "loss non-finite  norm 1.000  lr 1.00e-03  1,234 tok/s  1.50 GiB  10s left"
