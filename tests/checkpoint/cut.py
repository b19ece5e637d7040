"""Helpers that interrupt a run after the fact, and compare two runs bit by bit."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.layout import SliceReader
from tests.harness import lines


def cut(run: Path, at: int, into: Path) -> Path:
    """Copy `run` to `into`, as if it had crashed right after the checkpoint of step `at`."""
    copy = into / run.name
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > at:
            shutil.rmtree(folder)
    assert (copy / "checkpoints" / f"step-{at:08d}").is_dir()
    (copy / "checkpoints" / "latest").write_text(f"step-{at:08d}\n")
    written = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
    (copy / "metrics.jsonl").write_text("".join(line for line in written if json.loads(line)["step"] <= at))
    return copy


def attempts(run: Path) -> list[int]:
    """For each step, the attempt that wrote its (last) line."""
    return [line["attempt"] for line in lines(run)]


def column(run: Path, key: str) -> list[Any]:
    return [line[key] for line in lines(run)]


def everything(run: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint: weights, optimizer state, loss scaler."""
    reader = SliceReader(run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip())
    return {name: reader.read_whole(name) for name in reader.entries}


def hold_bitwise(run: Path, expected: Path, *, counted: str = "tokens") -> None:
    for key in ("step", "loss", "grad_norm", "lr", counted):
        assert column(run, key) == column(expected, key), key
    found, wanted = everything(run), everything(expected)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
