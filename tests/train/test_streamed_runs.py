"""Runs on streamed data and on mixtures: the same losses whatever the number of ranks, and after a resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.data.stream.stream import Stream
from shoal.mistakes import UserMistake
from tests.harness import lines, settings, train_again_on, train_on

STEPS = 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two files of instructions and one of text."""
    folder = tmp_path_factory.mktemp("streamed")
    for name in ("a", "b"):
        records = [
            {"instruction": f"{name} {number}", "output": f"{number} " * (number % 5 + 1)} for number in range(20)
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "text.txt").write_text("".join(f"line {number} of the text\n" for number in range(100)))
    return folder


def config(data: dict[str, Any], steps: int = STEPS) -> dict[str, Any]:
    made = settings(Path("unused.jsonl"), train__schedule={"name": "constant", "warmup": 2}, train__steps=steps)
    made["data"] = {"max_length": 256, "workers": 2, **data}
    return made


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


@pytest.mark.slow
def test_a_streamed_run_resumes_on_another_number_of_ranks(files: Path, tmp_path: Path) -> None:
    data = {"path": str(files / "*.jsonl"), "streaming": {"chunk": 6, "shuffle_buffer": 12}, "pack": False}
    whole = losses(train_again_on(1, config(data), tmp_path / "whole"))
    assert len(set(whole)) == STEPS
    train_again_on(2, config(data, steps=2), tmp_path / "parts")
    saved = json.loads(next((tmp_path / "parts/run/checkpoints").glob("step-*/progress.json")).read_text())
    assert saved["stream"][0]["chunk"] > 0
    run = train_on(1, config(data), tmp_path / "parts", resume=True)
    assert losses(run) == pytest.approx(whole, rel=2e-6)
    fewer = config({**data, "path": str(files / "a.jsonl")}, steps=STEPS + 1)
    with pytest.raises(UserMistake, match="set is streamed from files with other names or sizes than before; restore"):
        train_on(1, fewer, tmp_path / "parts", resume=True)


def test_a_mixture_has_the_same_losses_on_two_ranks(files: Path, tmp_path: Path) -> None:
    blocks = [{"path": str(files / "a.jsonl"), "weight": 2}, {"path": str(files / "text.txt")}]
    data = {"source": blocks, "validation": 0.1}
    one, two = (train_again_on(ranks, config(data), tmp_path / str(ranks)) for ranks in (1, 2))
    assert losses(one) == pytest.approx(losses(two), rel=2e-6)


def test_a_streamed_run_is_evaluated_without_its_stream(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = {"path": str(files / "a.jsonl"), "streaming": True, "validation": str(files / "b.jsonl")}
    made = config(data, steps=2)
    made["eval"] = {"every": 2, "batches": 100}
    run = train_on(1, made, tmp_path)
    logged = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["eval_loss"]
    monkeypatch.delattr(Stream, "__init__")
    assert api.evaluate(run).metrics["loss"] == pytest.approx(logged, rel=1e-6)
