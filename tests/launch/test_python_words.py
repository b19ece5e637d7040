"""What the command says of its options, a Python caller is told of the arguments."""

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import api
from shoal.api.words import for_python
from shoal.config import config_to_yaml
from shoal.mistakes import UserMistake
from tests.launch.command import shoal as run_shoal

CONFIG: dict[str, Any] = {
    "name": "run",
    "model": {"shape": {"family": "llama", "hidden": 8, "layers": 1, "heads": 2, "vocab": 260}, "tokenizer": "bytes"},
    "data": {"path": "text.txt"},
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a run that has begun."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "config.yaml").write_text(config_to_yaml(shoal.load_config(None, needs_model=False)))
    (tmp_path / "runs" / "run" / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "text.txt").write_text("text")
    return tmp_path


def said(call: Callable[[], object]) -> str:
    with pytest.raises(UserMistake) as raised:
        call()
    return str(raised.value)


def test_a_run_that_exists(folder: Path) -> None:
    found = "runs/run already holds a run; add {} to continue it, {} to delete it, or another name=…"
    assert said(lambda: shoal.train(CONFIG)) == found.format("resume=True", "overwrite=True")
    (folder / "run.yaml").write_text(config_to_yaml(api.config_from_mapping(CONFIG)))
    assert run_shoal(folder, "train", "run.yaml").err == f"shoal: {found.format('--resume', '--overwrite')}\n"


def test_a_run_that_does_not_exist(folder: Path) -> None:
    assert said(lambda: shoal.train(CONFIG, name="new", resume=True)) == (
        "resume=True: there is no run in runs/new; start it without resume=True."
    )


def test_arguments_with_values(folder: Path) -> None:
    api.init("chess-tiny")
    assert said(lambda: api.init("chess-tiny")).endswith("already exists; choose another name with output=….")
    assert said(lambda: api.bench_collectives(repeat=0)) == "repeat is 0, but must be at least 1."
    assert said(lambda: api.generate("runs/run", "a", tokens=0)) == "tokens=0 must be at least 1."


SENTENCES = {
    "start another run from the checkpoint with --from and name=…": (
        api.train,
        "start another run from the checkpoint with start_from and name=…",
    ),
    "Step 3 is in runs/a: continue with --from runs/a.": (
        api.train,
        "Step 3 is in runs/a: continue with start_from='runs/a'.",
    ),
    "add --random N or --optuna N, or --list FILE.": (api.sweep, "add random=N or trials=N, or listed=FILE."),
    "export it with --to hf.": (api.export, "export it with to='hf'."),
    # A command that can be typed, and an option of another program.
    "use shoal export runs/x --to hf.": (api.export, "use shoal export runs/x --to hf."),
    "ask for more memory (Slurm: --mem)": (api.doctor, "ask for more memory (Slurm: --mem)"),
}


@pytest.mark.parametrize("typed", SENTENCES)
def test_words_of_the_command(typed: str) -> None:
    function, expected = SENTENCES[typed]
    assert for_python(typed, signature(function).parameters) == expected
