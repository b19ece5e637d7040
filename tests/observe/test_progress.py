"""The progress line says what a person asks, and warnings name the remedy, once each."""

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.observe.gpu import GpuMonitor
from shoal.observe.progress import Trend, format_metrics
from shoal.train.gpu_watch import ENOUGH, WARMUP, GpuWatch
from shoal.train.hooks import LogInterval, RunStart
from tests.harness import settings

LINE = {
    "step": 10, "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 1234.0, "mfu": 0.5, "memory_gib": 40.0,
    "memory_total_gib": 139.8, "seconds": 0.9, "save_seconds": 0.1, "data_seconds": 0.2, "communication_seconds": 0.05,
    "gpu_utilization": 97.4, "power_watts": 612.3, "temperature_celsius": 64.0,
}  # fmt: skip


def test_the_line_has_waits_and_the_gpu() -> None:
    assert format_metrics(LINE, 20, "↓") == (
        "loss 2.0000 ↓  norm 1.000  lr 1.00e-03  1,234 tok/s  MFU 50.0%  40.0/140 GiB  "
        "waits: data 20%, communication 5%, checkpoints 10%  GPU 97% 612 W 64 °C  10s left"
    )


def test_what_is_not_measured_is_not_shown() -> None:
    said = format_metrics({**LINE, "communication_seconds": None, "gpu_utilization": None, "data_seconds": 0.0}, 20)
    assert "communication" not in said
    assert "data" not in said
    assert "GPU" not in said


def test_the_trend_needs_some_lines_and_ignores_noise() -> None:
    def arrow(losses: list[float]) -> str:
        trend = Trend()
        return [trend.after(loss) for loss in losses][-1]

    assert arrow([3.0, 2.0, 1.0]) == ""
    assert arrow([4.0, 3.0, 2.0, 1.0]) == "↓"
    assert arrow([1.0, 2.0, 3.0, 4.0]) == "↑"
    assert arrow([2.0, 2.001, 2.001, 2.0]) == "→"
    assert arrow([9.0] * 30 + [1.0] * 30) == "→"  # only the last lines count


class Nvml(types.ModuleType):
    """As the library answers on a GPU, which no machine of the tests has."""

    NVML_TEMPERATURE_GPU = 0

    def __init__(self, busy: int, reasons: int) -> None:
        super().__init__("pynvml")
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
        self.nvmlDeviceGetMemoryInfo = lambda handle: types.SimpleNamespace(total=80 * 2**30)
        self.nvmlDeviceGetUtilizationRates = lambda handle: types.SimpleNamespace(gpu=busy)
        self.nvmlDeviceGetPowerUsage = lambda handle: 500_000
        self.nvmlDeviceGetTemperature = lambda handle, sensor: 88
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda handle: reasons
        self.nvmlDeviceGetPowerManagementDefaultLimit = lambda handle: 700_000
        self.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 400_000


def watched(
    nvml: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, *, data_seconds: float = 0.0
) -> tuple[list[str], dict[str, Any]]:
    """The warnings of a run with this NVML, and what its lines have of the GPU."""
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monitor = GpuMonitor("GPU-1", every=0.001)
    log = types.SimpleNamespace(readings=dict)
    hook = GpuWatch(monitor, log, api.config_from_mapping(settings(Path("data.txt"))))  # type: ignore[arg-type]
    hook.on_run_start(RunStart(Path(), None, None, 0, 100))  # type: ignore[arg-type]
    monitor._thread.join(0.1)  # ends at once where NVML fails
    readings: dict[str, Any] = {}
    with caplog.at_level("WARNING"):
        for step in range(1, WARMUP + 4):
            while monitor._samples.count < ENOUGH and monitor._thread.is_alive():
                time.sleep(0.001)
            readings = log.readings()
            hook.on_metrics({"data_seconds": data_seconds}, LogInterval(step, 1, 1.0, 0, None, 0.0, None))
    hook.on_run_end(None)
    return [record.getMessage() for record in caplog.records], readings


def test_an_idle_gpu_is_told_apart_by_the_wait_for_data(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (host,), readings = watched(Nvml(55, 0), monkeypatch, caplog)
    assert host.startswith("the GPU is busy 55% of the time, and the host cannot launch its kernels fast enough")
    assert "raise train.micro_batch" in host
    assert readings == {
        "gpu_utilization": 55.0, "power_watts": 500.0, "temperature_celsius": 88, "memory_total_gib": 80.0
    }  # fmt: skip
    caplog.clear()
    (data,), _ = watched(Nvml(55, 0), monkeypatch, caplog, data_seconds=0.4)
    assert "training waits for data 40% of the time: " in data
    assert "SHOAL_CACHE" in data


def test_throttling_is_warned_of_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hot, supply, capped = watched(Nvml(99, 0x40 | 0x80 | 0x04), monkeypatch, caplog)[0]
    assert "because of heat (88 °C), 100% of the time" in hot
    assert "power supply" in supply
    assert "nvidia-smi -pl WATTS" in capped


def test_without_nvml_nothing_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert watched(None, monkeypatch, caplog) == ([], {})
    broken = Nvml(50, 0)
    broken.nvmlInit = lambda: 1 / 0
    assert watched(broken, monkeypatch, caplog)[1] == {}
