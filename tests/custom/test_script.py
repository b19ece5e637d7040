"""A script with a custom loop, as a user starts it: it becomes several processes, survives a kill, and stops on a
signal with a checkpoint."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.config.load import load_config
from shoal.convert.export import export_hf
from tests.harness import lines, run_ranks, weights
from tests.launch.command import Command, ForkedScript, environment, rank_process, training_lines

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
train: {steps: 40, precision: 32-true}
hardware: {devices: 2}
parallel: {strategy: fsdp}
checkpoint: {every: 10}
log: {every: 1, to: []}
"""

pytestmark = pytest.mark.slow


def start(folder: Path, *overrides: str, restarts: int = 0, forked: bool = True) -> Command:
    """`python script.py`, of which a fork takes a tenth of the time."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "run.yaml").write_text(CONFIG)
    env, arguments = environment(folder, RESTARTS=str(restarts)), ["script.py", *overrides]
    return ForkedScript(folder, arguments, env) if forked else Command(folder, [sys.executable, *arguments], env)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    @cache
    def train(world_size: int) -> Path:
        folder = tmp_path_factory.mktemp("undisturbed")
        (folder / "run.yaml").write_text(CONFIG)

        def be() -> None:
            os.chdir(folder)
            sys.argv = ["script.py", f"hardware.devices={world_size}"]
            exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})

        run_ranks(world_size, be)
        return folder / "runs" / "run"

    return train


def test_a_killed_rank_costs_a_restart_and_nothing_else(undisturbed: Callable[[int], Path], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    with start(tmp_path, restarts=1) as script:
        script.wait_until(lambda: max(training_lines(run), default=0) >= 15)
        os.kill(rank_process(script.process.pid, 1), signal.SIGKILL)
        ended = script.wait()
    assert (ended.status, ended.out) == (0, "finished 40\n"), ended.err
    assert "All processes were restarted" in ended.err
    hold_same(run, undisturbed(2))
    assert load_config(run / "config.yaml", needs_model=False).name == "run"
    exported = export_hf(run, tmp_path / "exported")
    assert [path.name for path in exported.iterdir()] == ["model.safetensors"]


@pytest.mark.parametrize("devices", [1, 2])
def test_a_signal_saves_and_the_status_says_to_start_again(
    devices: int, undisturbed: Callable[[int], Path], tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "run"
    with start(tmp_path, f"hardware.devices={devices}", forked=devices == 1) as script:
        script.wait_until(lambda: max(training_lines(run), default=0) >= 15)
        os.kill(script.process.pid, signal.SIGTERM)
        ended = script.wait()
    assert (ended.status, ended.out) == (75, ""), ended.err
    stopped = lines(run)[-1]["step"]
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step-{stopped:08d}"
    assert json.loads((run / "outcome.json").read_text())["state"] == "stopped"
    with start(tmp_path, f"hardware.devices={devices}") as script:
        ended = script.wait()
    assert (ended.status, ended.out) == (0, "finished 40\n"), ended.err
    hold_same(run, undisturbed(devices))


def test_a_mistake_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    # The status of an exception is that of the interpreter, which a fork does not have.
    with start(tmp_path, "train.micro_batch=3", "hardware.devices=1", forked=False) as script:
        ended = script.wait()
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.splitlines()[-1].startswith("shoal: train.micro_batch 3 does not divide the 4 samples")
    assert "Traceback" not in ended.err


def hold_same(run: Path, expected: Path) -> None:
    def losses(one: Path) -> list[Any]:
        return [(line["step"], line["loss"], line["grad_norm"]) for line in lines(one)]

    assert losses(run) == losses(expected)
    found, wanted = weights(run), weights(expected)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
