"""`shoal bench host`: the host's time to launch a block, as the forecast takes it."""

import json
from pathlib import Path

import pytest
import torch

from shoal import api
from shoal.bench import host
from shoal.mistakes import UserMistake
from tests.launch.command import forked_shoal
from tests.plan.planning import plan, tokens_per_second

SMALL = {"hidden": 32, "heads": 2, "ffn": 64, "vocab": 64, "positions": 64, "tied": True}
SHORT = ("model.shape=qwen2.5-0.5b", "hardware.gpu=h200", "train.micro_batch=1", "train.global_batch=1")
SHORT += ("data.max_length=256", "train.cuda_graphs=false", "train.steps=10")


def test_a_host_is_measured_by_what_more_blocks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SIZES", SMALL)
    monkeypatch.setattr(host, "STEPS", 8)
    said: list[str] = []
    found = host.measure_on(torch.device("cpu"), said.append)
    assert said == ["measuring 8 steps of 4 and of 12 blocks …"]
    values = found.as_dict()
    few, many = values["rows"]
    assert (few["blocks"], many["blocks"], many["steps"]) == (4, 12, 8)
    assert values["host_block_ms"] == pytest.approx((many["step_ms"] - few["step_ms"]) / 8, abs=1e-3)
    assert values["host_block_ms"] > 0
    assert f"hardware.host_block_ms={found.block_ms:.2f}" in found.text()


def test_a_busy_host_is_called_one() -> None:
    steady = host.HostReport([0.010] * 10, [0.026] * 10, "a GPU", "a CPU")
    assert steady.block_ms == pytest.approx(2.0)
    assert not steady.caveats
    busy = host.HostReport([0.010] * 10, [0.026] * 7 + [0.068] * 3, "a GPU", "a CPU")
    assert busy.block_ms == pytest.approx(2.0)
    assert "2.6 times as long" in busy.caveats[0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_command_says_what_it_needs(tmp_path: Path) -> None:
    ended = forked_shoal(tmp_path, "bench", "host", "--json")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    assert "there is none" in ended.err
    with pytest.raises(UserMistake, match="there is none"):
        api.bench_host()


def test_a_slower_host_makes_a_run_slower_that_waits_for_it() -> None:
    usual, slow = tokens_per_second(*SHORT), tokens_per_second(*SHORT, "hardware.host_block_ms=4")
    assert usual == tokens_per_second(*SHORT, "hardware.host_block_ms=2")
    assert 1.8 < usual / slow < 2.05
    # One that the device hides changes nothing.
    long = (*SHORT, "train.micro_batch=32", "train.global_batch=32", "data.max_length=2048")
    assert tokens_per_second(*long) == tokens_per_second(*long, "hardware.host_block_ms=4")


def test_a_plan_that_waits_for_its_host_names_the_measurement() -> None:
    notes = " ".join(plan(*SHORT).notes)
    assert "shoal bench host measures it for hardware.host_block_ms" in notes
    given = plan(*SHORT, "hardware.host_block_ms=4")
    assert "shoal bench host" not in " ".join(given.notes)
    assert json.loads(json.dumps(given.as_dict()))["hardware"]["host_block_ms"] == 4
    on_cpu = " ".join(plan("model.shape=gpt2", "train.steps=1", "hardware.gpu=cpu", "hardware.host_block_ms=4").notes)
    assert "hardware.host_block_ms has no effect" in on_cpu
