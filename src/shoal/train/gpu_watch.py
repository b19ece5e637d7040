"""What the GPU of this rank does, in the log lines, and warnings if it is idle or slowed down."""

import logging

import torch

from shoal.config.schema import Config
from shoal.observe.gpu import GpuMonitor, Samples
from shoal.observe.metrics import Line
from shoal.train.hooks import Hook, LogInterval, RunStart
from shoal.train.log import StepLog
from shoal.train.slow_data import SHARE, remedy

LOGGER = logging.getLogger(__name__)
BUSY = 80.0  # per cent
THROTTLED = 0.1  # share of the samples
ENOUGH = 20  # samples, one per second, after the warmup
WARMUP = 10  # steps, which compile


def monitor_of(device: torch.device) -> GpuMonitor | None:
    """A monitor of this CUDA device; None for other devices."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return None if uuid is None else GpuMonitor(f"GPU-{uuid}")


class GpuWatch(Hook):
    """Every rank watches its own GPU: warnings name the rank. The log lines have what rank 0's does."""

    def __init__(self, monitor: GpuMonitor | None, log: StepLog, config: Config) -> None:
        self.monitor = monitor
        self.log = log
        self.config = config
        self._first = 0
        self._last = Samples()  # of the last log interval
        self._seen = Samples()
        self._waited = self._seconds = 0.0
        self._warned: set[str] = set()

    def on_run_start(self, start: RunStart) -> None:
        self._first = start.step + WARMUP
        if self.monitor is not None:
            self.monitor.start()
            self.log.readings = self._read

    def _read(self) -> dict[str, float | int | None]:
        assert self.monitor is not None
        if self.monitor.memory_gib is None:
            return {}  # NVML has not answered
        found = self.monitor.take()
        self._last = found
        mean = max(1, found.count)
        known = found.count > 0
        return {
            "gpu_utilization": round(found.utilization / mean, 1) if known else None,
            "power_watts": round(found.watts / mean, 1) if known else None,
            "temperature_celsius": found.celsius if known else None,
            "memory_total_gib": round(self.monitor.memory_gib, 3),
        }

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        if self.monitor is None or interval.step - interval.steps < self._first:
            return
        seen, last = self._seen, self._last
        self._last = Samples()
        for name in ("count", "utilization", "hot", "capped", "supply"):
            setattr(seen, name, getattr(seen, name) + getattr(last, name))
        seen.celsius = max(seen.celsius, last.celsius)
        self._waited += (line["data_seconds"] or 0.0) * interval.steps
        self._seconds += interval.seconds
        if seen.count >= ENOUGH:
            self._judge(seen)
            self._seen, self._waited, self._seconds = Samples(), 0.0, 0.0

    def _judge(self, seen: Samples) -> None:
        busy = seen.utilization / seen.count
        if busy < BUSY:
            waits = self._waited / self._seconds if self._seconds else 0.0
            if waits > SHARE:
                why = f"training waits for data {waits:.0%} of the time: {remedy(self.config.data)}"
            else:
                why = f"the host cannot launch its kernels fast enough: {self._more_work()}"
            self._warn("busy", f"the GPU is busy {busy:.0f}% of the time, and {why}.")
        if seen.hot > THROTTLED * seen.count:
            self._warn(
                "hot",
                f"the GPU lowers its clock because of heat ({seen.celsius:.0f} °C), {seen.hot / seen.count:.0%} of the "
                "time: look at its cooling, or move the job to another node.",
            )
        if seen.supply > THROTTLED * seen.count:
            self._warn("supply", "the GPU lowers its clock because of its power supply: tell who runs this machine.")
        if seen.capped > THROTTLED * seen.count:
            self._warn(
                "capped",
                "the GPU lowers its clock because its power limit is below the usual one: nvidia-smi -q -d POWER shows "
                "both, nvidia-smi -pl WATTS raises it.",
            )

    def _more_work(self) -> str:
        remedies = ["raise train.micro_batch"]
        if self.config.train.compile is False:
            remedies.append("set train.compile: true")
        if self.config.train.recompute == "full":
            remedies.append("use less activation checkpointing (train.recompute)")
        return ", or ".join(remedies)

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            LOGGER.warning("%s", text)

    def on_run_end(self, error: BaseException | None) -> None:
        if self.monitor is not None:
            self.monitor.stop()
