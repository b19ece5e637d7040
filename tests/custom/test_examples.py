"""The examples of custom loops train, and the same on one rank and two."""

import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.harness import lines, run_ranks, slow

EXAMPLES = Path(__file__).parents[2] / "examples" / "loops"
COMMON = ["log.every=1", "log.to=[]", "train.precision=32-true", "train.deterministic=true"]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def train(name: str, world_size: int, runs: Path, *overrides: str) -> Path:
    module = load(name)
    run_ranks(world_size, lambda: module.main([*COMMON, f"run_dir={runs}", *overrides]))
    return runs / name


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in lines(run)]


@pytest.mark.parametrize("name", [slow("diffusion"), slow("vit"), slow("gan"), "mlp"])
def test_ddp_and_fsdp_have_the_losses_of_one_process(name: str, tmp_path: Path) -> None:
    short = ["train.epochs=null", "train.steps=3", "checkpoint.at_end=false"]
    whole = {"diffusion": 16, "vit": 16, "gan": 32, "mlp": 64}[name]
    one = losses(train(name, 1, tmp_path / "one", *short, f"train.micro_batch={whole // 2}"))
    assert len(one) == 3
    for strategy in ("ddp", "fsdp"):
        assert losses(train(name, 2, tmp_path / strategy, *short, f"parallel.strategy={strategy}")) == one


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "vit", "diffusion"])
def test_the_example_learns(name: str, tmp_path: Path) -> None:
    found = losses(train(name, 1, tmp_path))
    assert sum(found[-4:]) < 0.8 * sum(found[:4])


@pytest.mark.slow
def test_five_lines_are_the_difference_between_before_and_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train("after", 1, tmp_path)
    assert len(lines(run)) == 32
    saved = load_file(run / "model.safetensors")
    assert all(math.isfinite(float(one.sum())) for one in saved.values())
    monkeypatch.chdir(tmp_path)
    before: Any = load("before")
    run_ranks(1, before.main)
    assert set(torch.load(tmp_path / "model.pt", weights_only=True)) == set(saved)
