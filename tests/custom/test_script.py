"""A script with a custom loop, as a user starts it: it becomes several processes, survives a kill, and stops on a
signal with a checkpoint."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.load import load_config
from shoal.convert.export import export_hf
from tests.harness import lines, run_ranks, weights
from tests.launch.command import PATIENCE, environment

SCRIPT = """
import os, sys, time
import shoal
restarts = int(os.environ.get("RESTARTS", "0"))
run = shoal.init("run.yaml", resume="auto", max_restarts=restarts, overrides=sys.argv[1:])
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(torch.arange(64.0).view(16, 4) / 64), batch_size=4, shuffle=True)
model, optimizer, loader = run.prepare(model, optimizer, loader)
for (inputs,) in run.steps(loader):
    run.backward(model(inputs).square().mean())
    run.step(optimizer)
    time.sleep(0.02)
if run.first:
    print("finished", run.step_number)
"""
CONFIG = """
name: run
train: {steps: 60, precision: 32-true}
hardware: {devices: 2}
parallel: {strategy: fsdp}
checkpoint: {every: 10}
log: {every: 1, to: []}
"""

pytestmark = pytest.mark.slow


def start(folder: Path, *overrides: str, restarts: int = 0) -> "subprocess.Popen[str]":
    (folder / "script.py").write_text(SCRIPT)
    (folder / "run.yaml").write_text(CONFIG)
    return subprocess.Popen(
        [sys.executable, "script.py", *overrides],
        cwd=folder,
        env=environment(folder, RESTARTS=str(restarts)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(run: Path, step: int) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until:
        if (run / "metrics.jsonl").is_file() and any(line["step"] >= step for line in lines(run)):
            return
        time.sleep(0.05)
    raise AssertionError("the script did not train")


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank → process, of the children of a launcher."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks = [int(one[5:]) for one in variables if one.startswith(b"RANK=")]
        if ranks:
            found[ranks[0]] = int(child)
    return found


def undisturbed(folder: Path, world_size: int, *overrides: str) -> Path:
    """The same script in ranks that are forked, which takes a tenth of the time."""
    folder.mkdir()
    (folder / "run.yaml").write_text(CONFIG)

    def train() -> None:
        os.chdir(folder)
        sys.argv = ["script.py", *overrides]
        exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})

    run_ranks(world_size, train)
    return folder / "runs" / "run"


def test_a_killed_rank_costs_a_restart_and_nothing_else(tmp_path: Path) -> None:
    process = start(tmp_path, restarts=1)
    run = tmp_path / "runs" / "run"
    wait_for(run, 25)
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "finished 60\n"), err
    assert "All processes were restarted" in err
    hold_same(run, undisturbed(tmp_path / "undisturbed", 2))
    assert load_config(run / "config.yaml", needs_model=False).name == "run"
    exported = export_hf(run, tmp_path / "exported")
    assert [path.name for path in exported.iterdir()] == ["model.safetensors"]


def test_a_signal_saves_and_the_status_says_to_start_again(tmp_path: Path) -> None:
    process = start(tmp_path, "hardware.devices=1")
    run = tmp_path / "runs" / "run"
    wait_for(run, 15)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (75, ""), err
    stopped = lines(run)[-1]["step"]
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{stopped:08d}"
    assert json.loads((run / "outcome.json").read_text())["state"] == "stopped"
    process = start(tmp_path, "hardware.devices=1")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (0, "finished 60\n"), err
    hold_same(run, undisturbed(tmp_path / "undisturbed", 1, "hardware.devices=1"))


def test_a_mistake_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    process = start(tmp_path, "train.micro_batch=3", "hardware.devices=1")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (2, "")
    assert err.splitlines()[-1].startswith("shoal: train.micro_batch 3 does not divide the 4 samples")
    assert "Traceback" not in err


def hold_same(run: Path, expected: Path) -> None:
    def losses(one: Path) -> list[Any]:
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(one)]

    assert losses(run) == losses(expected)
    found, wanted = weights(run), weights(expected)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
