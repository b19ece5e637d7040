"""More than a thousand damaged checkpoints and configs: each gives an error message or the correct data.

Never another exception, a hang, or weights that were not saved. Randomness is seeded, so that a failure is reproducible
by its kind and number.
"""

import json
import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from shoal import api
from shoal.catalogue.recipes import read_recipe, recipe_names
from shoal.checkpoint import state
from shoal.checkpoint.choose import choose_checkpoint
from shoal.checkpoint.layout import SliceReader
from shoal.checkpoint.store import MANIFEST, folder_for
from shoal.mistakes import UserMistake
from shoal.parallel.ranks import Ranks
from tests.faults.damage import ANY_JSON, MANIFEST_ONLY, TENSORS_ONLY, hashed_anew, written
from tests.faults.fuzzing import PARTS, hold_sentence, problems_of
from tests.faults.odd_configs import ODD_CONFIGS
from tests.harness import LLAMA, settings, train_again_on

STEPS = 2
MANIFESTS = {**ANY_JSON, **MANIFEST_ONLY}
MANIFEST_CASES, TENSOR_CASES, TEXT_CASES = 20, 24, 8
EVERY = 8  # one case in so many is also exported
ALONE = Ranks(0, 1, 0, torch.device("cpu"))


def test_there_are_more_than_a_thousand() -> None:
    manifests = MANIFEST_CASES * len(MANIFESTS)
    tensors = TENSOR_CASES * len(TENSORS_ONLY)
    texts = TEXT_CASES * len(ANY_JSON) * 2
    configs = sum(cases for _, cases in ODD_CONFIGS.values())
    assert manifests + tensors + texts + configs > 1000


# Checkpoints.


class Victim:
    """A run with two checkpoints, each written by two ranks, and their contents."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.newest = folder_for(run / "checkpoints", STEPS)
        self.tensors = {step: everything(folder_for(run / "checkpoints", step)) for step in range(1, STEPS + 1)}
        self.exported = {step: self.export(step) for step in self.tensors}
        self.progress = {
            step: state.read_progress(folder_for(run / "checkpoints", step)) for step in range(1, STEPS + 1)
        }

    def export(self, step: int | None) -> dict[str, Tensor]:
        output = self.run.parent / "exported"
        shutil.rmtree(output, ignore_errors=True)
        return load_file(api.export(self.run, output, step=step) / "model.safetensors")


def everything(folder: Path) -> dict[str, Tensor]:
    reader = SliceReader(folder)
    # Copies: what the library reads may be the file itself, mapped into memory.
    return {name: reader.read_whole(name).clone() for name in reader.entries}


def hold_same(found: dict[str, Tensor], true: dict[str, Tensor], what: str) -> None:
    assert found.keys() == true.keys(), f"{what}: other names"
    for name, tensor in true.items():
        assert found[name].dtype == tensor.dtype, f"{what}: {name} is {found[name].dtype}"
        assert torch.equal(found[name], tensor), f"{what}: {name} is not what was saved"


@pytest.fixture(scope="module")
def victim(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Victim:
    short = {"train__steps": STEPS, "data__max_length": 48, "data__train_on": "all", "checkpoint__every": 1}
    small = {"model__shape": {**LLAMA, "layers": 1}}  # its tensors are read several times for each of a thousand cases
    config = settings(instructions, **short, **small, checkpoint__keep=9, parallel__strategy="fsdp")
    return Victim(train_again_on(2, config, tmp_path_factory.mktemp("victim")))


def hold(victim: Victim, *, export: bool) -> None:
    """Every way to read the run's checkpoints gives an error message or what was saved."""
    for verify in (False, True):
        for listed in api.checkpoints(victim.run, verify=verify):
            assert listed.state in ("whole", "not whole", "damaged")
            assert listed.text().encode()
            json.dumps(listed.as_dict())
    for step in (None, STEPS):
        try:
            chosen = choose_checkpoint(victim.run, step)
            assert chosen.path == folder_for(victim.run / "checkpoints", chosen.step)
            hold_same(everything(chosen.path), victim.tensors[chosen.step], f"step {step}")
            assert state.read_progress(chosen.path).step == chosen.step
        except UserMistake as mistake:
            hold_sentence(mistake)
    folder = state.newest([victim.run / "checkpoints"], ALONE)
    if folder is not None:
        try:
            hold_same(everything(folder), victim.tensors[int(folder.name.removeprefix("step-"))], "resumed")
        except UserMistake as mistake:
            hold_sentence(mistake)
    if export:
        try:
            exported = victim.export(STEPS)
        except UserMistake as mistake:
            hold_sentence(mistake)
        else:
            hold_same(exported, victim.exported[STEPS], "exported")


@PARTS
@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_damaged_manifest_gives_a_message_or_the_saved_data(kind: str, part: str, victim: Victim) -> None:
    path = victim.newest / MANIFEST
    whole = path.read_bytes()

    def attempt(chance: Random, number: int) -> None:
        with written({path: MANIFESTS[kind](whole, chance)}):
            hold(victim, export=number % EVERY == 0)

    assert problems_of(MANIFEST_CASES, part, kind, attempt) == []


@PARTS
@pytest.mark.parametrize("kind", TENSORS_ONLY)
def test_damaged_tensors_give_a_message_or_the_saved_data_even_with_a_matching_hash(
    kind: str, part: str, victim: Victim
) -> None:
    files = sorted(victim.newest.glob("rank-*.safetensors"))

    def attempt(chance: Random, number: int) -> None:
        path = chance.choice(files)
        damaged = TENSORS_ONLY[kind](path.read_bytes(), chance)
        with written(hashed_anew(path, damaged) if number % 2 else {path: damaged}):
            hold(victim, export=number % EVERY < 2)

    assert problems_of(TENSOR_CASES, part, kind, attempt) == []


@PARTS
@pytest.mark.parametrize("kind", ANY_JSON)
@pytest.mark.parametrize("name", [state.PROGRESS, state.CONFIG])
def test_damaged_texts_give_a_message_or_the_saved_data_even_with_a_matching_hash(
    name: str, kind: str, part: str, victim: Victim
) -> None:
    path = victim.newest / name
    whole = path.read_bytes()

    def attempt(chance: Random, number: int) -> None:
        with written(hashed_anew(path, ANY_JSON[kind](whole, chance))):
            hold(victim, export=number == 0)
            try:
                found = state.read_progress(victim.newest)
            except UserMistake as mistake:
                hold_sentence(mistake)
            else:
                hold_types(found, victim.progress[STEPS])

    assert problems_of(TEXT_CASES, part, f"{name} {kind}", attempt) == []


def hold_types(found: state.Progress, true: state.Progress) -> None:
    """Only the hash can verify values, but their types must be right for the run to resume."""
    assert found.step == true.step
    for name, value in vars(true).items():
        if isinstance(value, int | str | dict | list):
            assert type(getattr(found, name)) is type(value), name
    for value in (found.loss, found.best, found.eval_loss, *found.metrics.values()):
        assert value is None or type(value) in (int, float)


# Configs.


@pytest.fixture(scope="module")
def good_configs(instructions: Path) -> list[str]:
    """The config of these tests, and every recipe with its open keys filled in."""
    own = api.config_to_yaml(api.config_from_mapping(settings(instructions)))
    return [own, *(read_recipe(name).replace("???", "gpt2") for name in recipe_names())]


@PARTS
@pytest.mark.parametrize("kind", ODD_CONFIGS)
def test_an_odd_config_gives_a_message_or_a_config_and_runs_nothing(
    kind: str, part: str, good_configs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHOAL_TEST_SECRET", "xyzzy-4711")
    make, cases = ODD_CONFIGS[kind]

    def attempt(chance: Random, number: int) -> None:
        path = tmp_path / "run.yaml"
        path.write_bytes(make(good_configs[number % len(good_configs)], tmp_path, chance))
        try:
            config = api.load_config(path)
        except UserMistake as mistake:
            hold_sentence(mistake)
        else:
            hold_config(config)
        assert not (tmp_path / "MARKER").exists()

    assert problems_of(cases, part, kind, attempt) == []


def hold_config(config: Any) -> None:
    """The result is a valid config: written to YAML and read again it is the same."""
    written_down = Path("again.yaml")
    written_down.write_text(api.config_to_yaml(config), encoding="utf-8")
    assert api.load_config(written_down) == config
