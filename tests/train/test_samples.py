"""`eval.prompts`: what the model writes at evaluations."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from tests.harness import lines, run_ranks, settings, slow, train_again_on

PROMPTS = ["345", "01234567"]
CHANGES: dict[str, Any] = {
    "data__validation": 0.1,
    "eval__every": 10,
    "train__steps": 20,
    "train__lr": 2e-2,
    "data__max_length": 48,
    "eval__batches": 1,
    "eval__tokens": 6,
    "checkpoint__every": 20,
}


def samples(run: Path) -> list[tuple[int, str, str]]:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [(one["step"], one["prompt"], one["text"]) for one in events if one["event"] == "sample"]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text that a tiny model learns in a few steps."""
    path = tmp_path_factory.mktemp("digits") / "digits.txt"
    path.write_text("0123456789" * 2000)
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Path:
    config = settings(digits, eval__prompts=PROMPTS, **CHANGES)
    return train_again_on(1, config, tmp_path_factory.mktemp("samples"))


def test_samples_are_what_the_checkpoint_generates(trained: Path) -> None:
    found = samples(trained)
    assert [(step, prompt) for step, prompt, _ in found] == [(step, prompt) for step in (10, 20) for prompt in PROMPTS]

    def generated() -> list[str]:
        loaded = api.load_run(trained)
        return [api.generate(loaded, prompt, tokens=6, temperature=0).text for prompt in PROMPTS]

    written = [text for step, _, text in found if step == 20]
    assert written == run_ranks(1, generated)[0]
    assert written == ["678901", "890123"]
    assert found[-1][2] in (trained / "report.html").read_text()


@pytest.mark.parametrize("strategy", ["fsdp", slow("ddp"), slow("zero1")])
def test_ranks_write_what_one_process_writes(strategy: str, trained: Path, tmp_path: Path, digits: Path) -> None:
    config = settings(digits, eval__prompts=PROMPTS, parallel__strategy=strategy, **CHANGES)
    assert samples(train_again_on(2, config, tmp_path)) == samples(trained)


def test_samples_change_nothing_in_training(trained: Path, tmp_path: Path, digits: Path) -> None:
    without = train_again_on(1, settings(digits, **CHANGES), tmp_path)
    assert samples(without) == []
    assert [line["loss"] for line in lines(trained)] == [line["loss"] for line in lines(without)]


@pytest.mark.parametrize("axis", ["tp", "pp", "cp"])
def test_model_parallelism_is_refused(axis: str, digits: Path) -> None:
    config = settings(digits, eval__prompts=PROMPTS, **{f"parallel__{axis}": 2})
    with pytest.raises(UserMistake, match=f"eval.prompts cannot be used with parallel.{axis} 2"):
        api.config_from_mapping(config)
