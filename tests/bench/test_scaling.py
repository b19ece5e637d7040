"""`shoal bench scaling` and `shoal bench batch`: what follows from recorded times, and the shape of their output."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.bench import steps
from shoal.bench.batch import BatchReport
from shoal.bench.batch import Point as BatchPoint
from shoal.bench.curves import Figures
from shoal.bench.curves_plot import plot_batches, plot_scaling
from shoal.bench.scaling import Point, ScalingReport, scaling_of
from shoal.bench.steps import OUT_OF_MEMORY, RanOutOfMemory
from shoal.config.load import config_from_mapping
from shoal.config.run import RunDirectory
from shoal.mistakes import RunFailed
from shoal.resilience.out_of_memory import OutOfMemory
from tests.harness import settings
from tests.launch.command import forked_shoal, write_config

ENVELOPE = ["bench", "date", "machine", "config", "rows", "caveats"]
PLANNED = {
    "name": "planned",
    "model": {"shape": "llama3-8b"},
    "data": {"path": "data.json", "max_length": 4096},
    "train": {"global_batch": 64, "micro_batch": 1},
    "hardware": {"gpu": "h100-80gb"},
}


def figures(seconds: float, tokens: float = 1000.0, memory: float = 1.0) -> Figures:
    return Figures(seconds, tokens, memory, None)


def test_efficiency_is_the_time_of_one_device_over_that_of_all() -> None:
    found = scaling_of({1: 8.0, 2: 4.0, 4: 2.5, 8: 2.0})
    assert [one.speedup for one in found.values()] == [1.0, 2.0, 3.2, 4.0]
    assert [one.efficiency for one in found.values()] == [1.0, 1.0, 0.8, 0.5]


def test_without_one_device_the_fewest_are_the_reference() -> None:
    found = scaling_of({8: 1.5, 4: 2.0})
    assert (found[4].speedup, found[4].efficiency) == (4.0, 1.0)
    assert found[8].speedup == pytest.approx(8 / 1.5)
    assert found[8].efficiency == pytest.approx(2 / 3)
    assert scaling_of({}) == {}


def test_each_strategy_is_compared_with_the_single_device() -> None:
    times = [("single", 1, 8.0), ("ddp", 2, 4.0), ("fsdp", 2, 5.0)]
    points = [Point(strategy, devices, figures(seconds), None) for strategy, devices, seconds in times]
    report = ScalingReport(points, {"device": "NVIDIA H200"}, config_from_mapping(PLANNED), [])
    rows = report.as_dict()["rows"]
    assert [row["measured"]["efficiency"] for row in rows] == [1.0, 1.0, 0.8]
    assert [row["forecast"] for row in rows] == [None, None, None]
    assert "fsdp           2     5.00 s" in report.text()
    tiny = ScalingReport([Point("ddp", 2, figures(1.0, memory=0.0012), None)], {}, config_from_mapping(PLANNED), [])
    assert " 0.0012" in tiny.text()
    assert plot_scaling(report).startswith(b"\x89PNG\r\n")


def test_the_largest_micro_batch_is_the_last_that_was_measured() -> None:
    points = [BatchPoint("none", 1, figures(1.0), None), BatchPoint("none", 2, None, None, out_of_memory=True)]
    report = BatchReport(points, {"device": "NVIDIA H200"}, config_from_mapping(PLANNED), 1, [])
    assert report.largest("none") == {"measured": 1, "forecast": None}
    assert [row["out_of_memory"] for row in report.rows()] == [False, True]
    assert "none                  2   out of memory" in report.text()
    assert plot_batches(report).startswith(b"\x89PNG\r\n")


def test_out_of_memory_ends_a_curve_and_not_the_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.bench import batch

    def measured(config: Any, **_: Any) -> Any:
        size = config.train.micro_batch
        if size > (2 if config.train.recompute == "none" else 4):
            raise RanOutOfMemory("a device ran out of memory")
        return figures(size * 0.1, memory=size), type("Found", (), {"machine": {"device": "NVIDIA H200"}})

    monkeypatch.setattr(batch, "measured_figures", measured)
    monkeypatch.setattr(batch, "local_devices", lambda: (8, False))
    config = config_from_mapping({**PLANNED, "hardware": {"gpu": "h100-80gb", "devices": 8}})
    found = batch.measure_batches(config, up_to=None, steps=1, warmup=1, measures=True, report=lambda _: None)
    assert found.largest("none")["measured"] == 2
    assert found.largest("full")["measured"] == 4
    sizes = [one.micro_batch for one in found.points_of("none")]
    assert sizes == [1 << index for index in range(len(sizes))], "doubled each time"
    assert found.points_of("none")[-1].forecast is not None
    assert not found.points_of("none")[-1].forecast.fits, "the forecast's curve goes on until it does not fit"
    assert found.as_dict()["largest"]["full"]["forecast"] >= 4


def test_a_failure_ends_a_curve_and_keeps_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from shoal.bench import batch

    def measured(config: Any, **_: Any) -> Any:
        if config.train.micro_batch > most:
            raise RunFailed("too many elements")
        return figures(0.1), type("Found", (), {"machine": {"device": "NVIDIA H200"}})

    monkeypatch.setattr(batch, "measured_figures", measured)
    monkeypatch.setattr(batch, "local_devices", lambda: (1, False))
    asked = {"up_to": 4, "steps": 1, "warmup": 1, "measures": True, "report": lambda _: None}
    config, most = config_from_mapping(PLANNED), 2
    found = batch.measure_batches(config, **asked)
    assert [(one.micro_batch, one.measured is not None) for one in found.points_of("none")][:3] == [
        *((1, True), (2, True), (4, False))
    ]
    assert "Micro-batch 4 with train.recompute=none was not measured: too many elements" in found.text()
    most = 0
    with pytest.raises(RunFailed, match="too many"):
        batch.measure_batches(config, **asked)


def test_a_killed_measurement_ran_out_of_the_hosts_memory(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"]
    with pytest.raises(RanOutOfMemory, match="host's memory"):
        steps._run(command, RunDirectory(tmp_path), 1, lambda _: None)


def test_the_measured_process_says_that_memory_ran_out(text: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from shoal.bench import training_worker

    def runs_out(*_: Any, **__: Any) -> None:
        raise OutOfMemory("GPU 0 ran out of memory", "", None)

    monkeypatch.setattr(training_worker, "start", runs_out)
    monkeypatch.setattr(sys, "argv", ["worker", str(write_config(tmp_path, settings(text))), str(tmp_path / "runs")])
    assert training_worker.main() == OUT_OF_MEMORY


@pytest.fixture
def folder(text: Path, tmp_path: Path) -> Path:
    write_config(tmp_path, settings(text, train__steps=1000))
    return tmp_path


def test_more_devices_than_there_are_is_a_forecast(tmp_path: Path) -> None:
    write_config(tmp_path, PLANNED)
    asked = ["run.yaml", "--devices", "1,2,16", "--strategies", "ddp,fsdp", "--no-measure", "--json"]
    done = forked_shoal(tmp_path, "bench", "scaling", *asked)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert list(found)[:6] == ENVELOPE
    assert (found["bench"], found["machine"], found["forecast_for"]["gpu"]) == ("scaling", {}, "h100-80gb")
    names = [(row["strategy"], row["devices"]) for row in found["rows"]]
    assert names == [("single", 1), ("ddp", 2), ("ddp", 16), ("fsdp", 2), ("fsdp", 16)]
    one, *_, two, sixteen = (row["forecast"] for row in found["rows"])
    assert all(row["measured"] is None for row in found["rows"])
    assert one["efficiency"] == 1
    assert one["step_seconds"] > two["step_seconds"] > sixteen["step_seconds"]
    assert sixteen["allocated_gib"] < two["allocated_gib"]
    assert sixteen["efficiency"] == pytest.approx(one["step_seconds"] / 16 / sixteen["step_seconds"], rel=1e-3)


@pytest.mark.slow
def test_a_measured_scaling_has_the_caveat_of_shared_cores(folder: Path) -> None:
    asked = ["--devices", "1,2", "--strategies", "ddp", "--steps", "1", "--warmup", "1", "--output", "found", "--json"]
    done = forked_shoal(folder, "bench", "scaling", "run.yaml", *asked)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    one, two = (row["measured"] for row in found["rows"])
    assert two["speedup"] == pytest.approx(one["step_seconds"] / two["step_seconds"], rel=1e-3)
    assert two["efficiency"] == pytest.approx(two["speedup"] / 2, rel=1e-3)
    assert one["epoch_seconds"] > one["step_seconds"]
    assert min(one["allocated_gib"], two["allocated_gib"]) > 0
    assert any("say nothing about several GPUs" in caveat for caveat in found["caveats"])
    assert json.loads((folder / "found/scaling.json").read_text()) == found
    assert (folder / "found/scaling.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.slow
def test_a_measured_batch_sweep_has_both_curves(folder: Path) -> None:
    asked = ["--up-to", "2", "--steps", "1", "--warmup", "1", "--output", "found", "--json"]
    done = forked_shoal(folder, "bench", "batch", "run.yaml", *asked)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert list(found)[:6] == ENVELOPE
    assert [(row["recompute"], row["micro_batch"]) for row in found["rows"]] == [
        ("none", 1), ("none", 2), ("full", 1), ("full", 2)
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["measured"]["tokens_per_second"] > 0
        assert row["forecast"]["fits"]
    assert (folder / "found/batch.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["scaling", "run.yaml", "--devices", "1,two"], "--devices '1,two' is not a list of numbers of devices"),
        (["scaling", "run.yaml", "--strategies", "fdsp"], "Did you mean fsdp"),
        (["scaling", "run.yaml", "--devices", "1,3"], "train.global_batch 8 is not a multiple of 3 devices"),
        (["batch", "run.yaml", "hardware.devices=512"], "hardware.devices is 512, but this machine has"),
        (["batch", "run.yaml", "data.path=nowhere.txt", "--output", "found"], "nowhere.txt does not exist"),
        (["scaling", "run.yaml", "data.path=nowhere.txt"], "nowhere.txt does not exist"),
        (["train", "run.yaml", "data.path=nowhere.txt"], "nowhere.txt does not exist"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(
    arguments: list[str], sentence: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "_run", lambda *_: pytest.fail("a process was started"))
    done = forked_shoal(folder, "bench", *arguments)
    assert (done.status, done.out) == (2, "")
    assert sentence in done.err
    assert done.err.count("\n") == 1
    assert not (folder / "found").exists()
