"""The commands of the pages run, in order, in a folder with the files that the page shows."""

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.page_blocks import COMMANDS, DOCS, PAGES, ROOT, Block, blocks, commands
from benchmarks.page_files import PageFiles
from shoal.cli.json_document import PRINTED, described
from tests.docs.running import page_environment, page_files, run_page
from tests.launch.command import forked_shoal

# Real weights for the pages that fine-tune SmolLM2; without them a tiny model with the same tokenizer interface.
SMOLLM2 = os.environ.get("SHOAL_TEST_SMOLLM2")
# Nothing is trained on these: seconds of one core.
QUICK = {"plan.md", "tutorials/out-of-memory.md"}


def names(*, quick: bool) -> list[str]:
    """Pages with commands that run, relative to docs/."""
    pages = [page for page in [*PAGES, ROOT / "README.md"] if any(is_run(block) for block in blocks(page))]
    found = [Path(os.path.relpath(page, DOCS)).as_posix() for page in pages]
    return [name for name in found if (name in QUICK) == quick]


def is_run(block: Block) -> bool:
    return block.language in COMMANDS and any(command.is_run for command in commands(block))


@pytest.fixture(scope="module")
def env(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return page_environment(tmp_path_factory.mktemp("docs"))


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, env: dict[str, str]) -> PageFiles:
    """Made once for all pages."""
    return page_files(tmp_path_factory.mktemp("given"), env)


@pytest.mark.parametrize("name", names(quick=True))
def test_the_commands_of_the_page_run(name: str, tmp_path: Path, env: dict[str, str], given: PageFiles) -> None:
    assert run_page(DOCS / name, tmp_path, env, given, exact=True) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", names(quick=False))
def test_the_commands_of_the_page_train(name: str, tmp_path: Path, env: dict[str, str], given: PageFiles) -> None:
    needs_weights = any("models/smollm2-135m" in one.body and is_run(one) for one in blocks(DOCS / name))
    if needs_weights and SMOLLM2:
        shutil.copytree(SMOLLM2, tmp_path / "models" / "smollm2-135m")
    elif needs_weights:
        given.provide("models/smollm2-135m", tmp_path)
    # A tiny model answers nonsense.
    assert run_page(DOCS / name, tmp_path, env, given, compared=not needs_weights or SMOLLM2 is not None) > 0


# What is compared with docs/json.md: entry of PRINTED → a command that prints it, in a folder with two runs.
JSON = {
    "shoal train": "shoal train run.yaml name=json train.steps=2",
    "shoal train --dry-run": "shoal train run.yaml --dry-run",
    "shoal plan": "shoal plan run.yaml",
    "shoal submit": "shoal submit run.yaml hardware.devices=1 hardware.gpu=a100-80gb name=job --dry-run",
    "shoal top": "shoal top first",
    "shoal logs": "shoal logs first",
    "shoal report": "shoal report runs/first",
    "shoal checkpoints": "shoal checkpoints runs/first",
    "shoal data preview": "shoal data preview run.yaml",
    "shoal data stats": "shoal data stats run.yaml",
    "shoal generate": "shoal generate runs/first a --tokens 2",
    "shoal eval": "shoal eval runs/first",
    "shoal eval --generate": "shoal eval runs/helper --generate",
    "shoal export": "shoal export runs/first --to hf",
    "shoal import (a checkpoint)": "shoal import full/pytorch_model.bin --model llama --output full-hf",
    "shoal import (a config)": "shoal import ds_config.json",
    "shoal init": "shoal init chess-tiny",
    "shoal doctor": "shoal doctor",
}
# Keys that depend on the run: a profile, a plan without a GPU, metrics of an objective.
SOMETIMES = {"profile", "plan", "goodput", "script", "recipes"}


@pytest.mark.slow
def test_keys_of_json_are_those_of_the_page(tmp_path: Path, env: dict[str, str], given: PageFiles) -> None:
    given.provide("runs/first runs/helper full/pytorch_model.bin ds_config.json", tmp_path)
    wrong = {}
    for entry, command in JSON.items():
        ended = forked_shoal(tmp_path, *command.split()[1:], "--json", env=env)
        assert ended.status in (0, 3), f"{command}\n{ended.err}"
        on_page = {name for key in described(PRINTED[entry]) for name in key.split(", ")}
        found = set(json.loads(ended.out))
        missing = on_page - found - SOMETIMES - {"…"}
        unknown = found - on_page - SOMETIMES if "…" not in on_page else set()
        if missing or unknown:
            wrong[entry] = {"not printed": sorted(missing), "not on the page": sorted(unknown)}
    assert wrong == {}
