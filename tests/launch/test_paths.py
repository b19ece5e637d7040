"""A path that the operating system refuses to look up is a user mistake, wherever it is given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.mistakes import UserMistake
from tests.harness import settings

# The name of the path in the message, and how it is given.
DOORS: dict[str, tuple[str, Callable[[str, dict[str, Any]], object]]] = {
    "file": ("The file", lambda path, config: api.load_config(path)),
    "model": ("model.from", lambda path, config: api.dry_run(changed(config, model={"from": path}))),
    "model to plan": ("model.from", lambda path, config: api.plan(changed(config, model={"from": path}))),
    "tokenizer": ("model.tokenizer", lambda path, config: api.dry_run(changed(config, model__tokenizer=path))),
    "run_dir": ("run_dir", lambda path, config: api.train(changed(config, run_dir=path))),
    "runs": ("run_dir", lambda path, config: api.train(changed(config), runs=path)),
    "from": ("--from", lambda path, config: api.train(changed(config), start_from=path)),
    "offload": (
        "parallel.offload.path",
        lambda path, config: api.train(changed(config, parallel__offload={"optimizer": "nvme", "path": path})),
    ),
    "generate": ("The run", lambda path, config: api.generate(path, "hi")),
    "evaluate": ("The run", lambda path, config: api.evaluate(path)),
    "checkpoints": ("The run", lambda path, config: api.checkpoints(path)),
    "export": ("The run", lambda path, config: api.export(path)),
    "export to": ("--output", lambda path, config: api.export("runs/run", path)),
    "import": ("The checkpoint", lambda path, config: api.import_checkpoint(path, "out")),
    "import to": ("OUTPUT", lambda path, config: api.import_checkpoint("somewhere", path)),
    "init": ("--output", lambda path, config: api.init("finetune-json", path)),
}


def changed(config: dict[str, Any], **changes: Any) -> api.Config:
    return api.config_from_mapping(settings(Path(config["data"]["path"]), **changes))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("x" * 5000, "File name too long"),
        ("~nosuchuser/x", "there is no home folder of nosuchuser"),
        ("a\0b", "embedded null byte"),
    ],
    ids=["too long", "no such user", "NUL"],
)
@pytest.mark.parametrize("door", DOORS)
def test_a_path_that_cannot_be_looked_up_is_one_sentence(
    door: str, path: str, reason: str, instructions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, give = DOORS[door]
    with pytest.raises(UserMistake) as caught:
        give(path, settings(instructions, run_dir=str(tmp_path)))
    assert str(caught.value).startswith(f"{name} ")
    assert str(caught.value).endswith(f" cannot be read: {reason}.")


def test_a_run_whose_name_is_too_long_for_a_folder_is_one_sentence(instructions: Path, tmp_path: Path) -> None:
    config = api.config_from_mapping(settings(instructions, name="x" * 300))
    with pytest.raises(UserMistake, match=r"run_dir \S+ cannot be read: File name too long\.$"):
        api.train(config, runs=tmp_path)
