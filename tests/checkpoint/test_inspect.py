"""`shoal checkpoints RUN` and `shoal checkpoints verify RUN`."""

import json
import shutil
from pathlib import Path

import pytest

from tests.harness import settings, train_again_on
from tests.launch.command import Ended, forked_shoal, shoal


@pytest.fixture(scope="module")
def trained(instructions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = settings(instructions, train__steps=6, checkpoint__every=2, checkpoint__keep=9, parallel__strategy="fsdp")
    return train_again_on(2, config, tmp_path_factory.mktemp("trained"))


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def listed(ended: Ended) -> dict[int, dict[str, object]]:
    return {one["step"]: one for one in json.loads(ended.out)["checkpoints"]}


def test_every_checkpoint_is_listed_with_its_size_metrics_and_state(run: Path) -> None:
    (run / "checkpoints" / "step-00000004" / "MANIFEST.json").unlink()
    ended = shoal(run.parent, "checkpoints", "run", "--json")
    assert (ended.status, ended.err) == (0, "")
    found = listed(ended)
    assert {step: one["state"] for step, one in found.items()} == {2: "whole", 4: "not whole", 6: "whole"}
    assert [one["latest"] for one in found.values()] == [False, False, True]
    folder = run / "checkpoints" / "step-00000002"
    assert found[2]["size"] == sum(path.stat().st_size for path in folder.iterdir())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert found[2]["metrics"] == {"loss": metrics[1]["loss"]}
    text = forked_shoal(run.parent, "checkpoints", "run")
    assert [line.split()[0] for line in text.out.splitlines()] == ["2", "4", "6"]
    assert "not whole" in text.out.splitlines()[1]
    assert text.out.splitlines()[2].rstrip().endswith(f"whole  latest  loss {metrics[5]['loss']:.4f}")


def test_verify_reads_every_file_and_answers_with_its_status(run: Path) -> None:
    fine = forked_shoal(run.parent, "checkpoints", "verify", "run", "--json")
    assert fine.status == 0, fine.err
    assert {one["state"] for one in listed(fine).values()} == {"whole"}
    path = run / "checkpoints" / "step-00000004" / "rank-00001.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    assert forked_shoal(run.parent, "checkpoints", "run").status == 0, "sizes alone do not show it"
    damaged = forked_shoal(run.parent, "checkpoints", "verify", "run", "--json")
    assert damaged.status == 3
    assert listed(damaged)[4]["state"] == "damaged"
    assert listed(damaged)[4]["damaged"] == "rank-00001.safetensors"
    said = forked_shoal(run.parent, "checkpoints", "verify", "run").out
    assert "damaged: rank-00001.safetensors" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere"], "There is no run nowhere. Give the folder of one, such as runs/NAME."),
        (["verify", "runs/frist"], "There is no run runs/frist. Did you mean runs/first?"),
        (["verify", "runs/first"], "runs/first holds no checkpoints; give the folder of a run, such as runs/NAME."),
    ],
)
def test_a_folder_without_checkpoints_is_a_mistake(arguments: list[str], says: str, tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    (tmp_path / "runs" / "first" / "config.yaml").touch()
    forked_shoal(tmp_path, "checkpoints", *arguments).hold_mistake(says)


def test_an_unknown_word_is_a_mistake(tmp_path: Path) -> None:
    ended = forked_shoal(tmp_path, "checkpoints", "verfiy", "run")
    assert ended.status == 2
    assert "verify and a run's folder" in ended.err
    assert "Traceback" not in ended.err
