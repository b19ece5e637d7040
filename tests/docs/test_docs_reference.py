"""The reference is generated: the committed pages are what the generators write, and they leave nothing out."""

import importlib
import json
from pathlib import Path

import pytest
import typer.main

import shoal.api
from benchmarks.page_blocks import DOCS
from shoal.api.document import GROUPS
from shoal.cli.app import app
from shoal.cli.document import _commands
from shoal.cli.json_document import PRINTED, keys
from shoal.observe.metric_names import EVALUATION, GPU, PREFERENCE, TRAINING
from tests.harness import settings, train_again_on

PAGES = {
    "commands.md": "shoal.cli.document",
    "json.md": "shoal.cli.json_document",
    "api.md": "shoal.api.document",
    "metrics.md": "shoal.observe.metric_names",
}


@pytest.mark.parametrize(("page", "module"), PAGES.items())
def test_the_page_is_what_its_generator_writes(page: str, module: str) -> None:
    assert (DOCS / page).read_text() == importlib.import_module(module).document(), "run make docs"


def test_every_function_of_the_api_is_on_its_page() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(
        {*shoal.api.__all__} - {"Config", "init_run"}
    )


def test_every_command_with_json_is_on_the_page_of_json() -> None:
    with_json = [
        name
        for name, command in _commands("shoal", typer.main.get_command(app))
        if any("--json" in one.opts for one in command.params)
    ]
    assert [name for name in with_json if not any(one.startswith(name) for one in PRINTED)] == []


def test_the_keys_on_the_page_of_json_are_those_of_a_plan() -> None:
    plan = shoal.api.plan(shoal.api.load_config(None, ["model.shape=pythia-160m", "hardware.gpu=a100-80gb"]))
    assert list(plan.as_dict()) == list(keys("shoal.plan.report", "Plan"))


def test_every_metric_of_a_run_is_on_the_page_of_metrics(text: Path, tmp_path: Path) -> None:
    run = train_again_on(1, settings(text, train__steps=2, eval__every=2, data__validation=0.2), tmp_path)
    found = {name for line in (run / "metrics.jsonl").read_text().splitlines() for name in json.loads(line)}
    assert found <= {*TRAINING, *GPU, *PREFERENCE, *EVALUATION}
    always = {*TRAINING} - {"samples", "samples_per_second", "profiled"}
    assert always | {*EVALUATION} <= found
