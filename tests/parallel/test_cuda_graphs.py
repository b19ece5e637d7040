"""On a CUDA device: a run whose micro-batches are replayed as CUDA graphs has the numbers of one without."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config import config_from_mapping
from shoal.config.run import RunDirectory
from shoal.launch.run import start
from shoal.parallel.cuda_graphs import GraphRunner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 10
SHAPE = {"family": "gpt2", "hidden": 256, "layers": 3, "heads": 4, "vocab": 512, "positions": 256}
CASES: dict[str, dict[str, Any]] = {
    "one micro-batch": {},
    "accumulation": {"train": {"micro_batch": 2}},
    "dropout": {"model": {"dropout": 0.1}},
    "fp16": {"train": {"precision": "16-mixed"}},
    "fp8": {"model": {"shape": SHAPE | {"family": "llama", "kv_heads": 2}}, "train": {"precision": "fp8"}},
    "fp32 and recomputation": {"train": {"precision": "32-true", "recompute": "full"}},
    "adapter": {"adapter": {"kind": "lora"}},
    "packed answers": {
        "data": {"path": "answers.jsonl", "source": "jsonl", "format": "completion"},
        "train": {"micro_batch": 2},
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "text.txt").write_text(Path(torch.nn.functional.__file__).read_text())
    rows = [{"prompt": f"{n}? " * (n % 11 + 1), "completion": f"It is {n}. " * (n % 7 + 1)} for n in range(4000)]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _train(
    folder: Path, name: str, different: dict[str, Any], *, graphs: bool, steps: int = STEPS, resume: bool = False
) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each step."""
    values: dict[str, Any] = {
        "name": name,
        "model": {"shape": SHAPE, "tokenizer": "bytes"},
        "data": {"source": "text", "path": "text.txt", "max_length": 256, "validation": 0},
        "train": {"steps": STEPS, "global_batch": 8, "micro_batch": 8, "lr": 1e-3, "deterministic": True},
        "checkpoint": {"every": steps},
        "log": {"every": 1},
    }
    for block, given in different.items():
        values[block] = values.get(block, {}) | given
    values["data"]["path"] = str(folder / values["data"]["path"])
    values["train"] |= {"cuda_graphs": graphs, "steps": steps, "schedule": {"name": "constant", "warmup": 0}}
    start(config_from_mapping(values), runs=folder, resume=resume)
    lines = [json.loads(line) for line in RunDirectory(folder / name).metrics.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines if "loss" in line]


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A number for each replay."""
    found: list[int] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: torch.cuda.CUDAGraph) -> None:
        found.append(len(found))
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    return found


@pytest.mark.parametrize("case", CASES)
def test_graphs_train_bitwise_the_same(case, folder, replays):
    name = case.replace(" ", "-")
    plain = _train(folder, f"{name}-plain", CASES[case], graphs=False)
    assert not replays
    found = _train(folder, f"{name}-graphs", CASES[case], graphs=True)
    assert len(replays) >= STEPS - 4
    assert found == plain


def test_a_resumed_run_is_bitwise_that_of_one_that_was_not_interrupted(folder, replays):
    different = CASES["dropout"]
    whole = _train(folder, "whole", different, graphs=True)
    _train(folder, "halves", different, graphs=True, steps=STEPS // 2)
    found = _train(folder, "halves", different, graphs=True, resume=True)
    assert found == whole


def test_a_model_that_cannot_be_captured_is_told_or_trains_without(folder, monkeypatch):
    def waits(self: GraphRunner, *given: Any) -> Any:
        torch.zeros((), device="cuda").item()
        return forward_backward(self, *given)

    forward_backward = GraphRunner.forward_backward
    plain = _train(folder, "waits-plain", {}, graphs=False)
    monkeypatch.setattr(GraphRunner, "forward_backward", waits)
    with pytest.raises(Exception, match=r"train\.cuda_graphs true: .* cannot be captured .*; use auto"):
        _train(folder, "waits", {}, graphs=True)
    monkeypatch.setattr("shoal.parallel.finish.GraphRunner", lambda *a, must, **k: GraphRunner(*a, must=False, **k))
    assert _train(folder, "waits-again", {}, graphs=True) == plain
