"""Utilization, power and temperature of a GPU through NVML, read in a thread; nothing where it is absent."""

import importlib
import logging
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

LOGGER = logging.getLogger(__name__)
EVERY = 1.0  # seconds between samples
# NVML's reasons for a lower clock: NVML_CLOCKS_EVENT_REASON_*.
POWER_CAP, HEAT, POWER_SUPPLY = 0x04, 0x08 | 0x20 | 0x40, 0x80


@dataclass
class Samples:
    """Sums over samples."""

    count: int = 0
    utilization: float = 0.0  # per cent of the time in which a kernel ran
    watts: float = 0.0
    celsius: float = 0.0  # highest
    hot: int = 0  # samples with a clock that is lower because of heat
    capped: int = 0  # because of a power limit that is below the usual one
    supply: int = 0  # because of the power supply


@dataclass
class GpuMonitor:
    """Samples one GPU until `stop`."""

    uuid: str  # of the device that CUDA uses: NVML numbers devices in its own way
    every: float = EVERY
    memory_gib: float | None = None
    _samples: Samples = field(default_factory=Samples)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _over: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="shoal-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()

    def take(self) -> Samples:
        """The samples since the last call."""
        with self._lock:
            found, self._samples = self._samples, Samples()
        return found

    def _run(self) -> None:
        with suppress(Exception):  # the library is not installed, the driver has no NVML, or it refuses
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            try:
                handle = nvml.nvmlDeviceGetHandleByUUID(self.uuid)
                self.memory_gib = nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
                LOGGER.debug("NVML answers for %s", self.uuid)
                while not self._over.is_set():
                    self._sample(nvml, handle)
                    self._over.wait(self.every)
            finally:
                nvml.nvmlShutdown()

    def _sample(self, nvml: Any, handle: Any) -> None:
        busy = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
        watts = nvml.nvmlDeviceGetPowerUsage(handle) / 1000
        celsius = nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        reasons = _clock_reasons(nvml, handle)
        lowered = bool(reasons & POWER_CAP) and _limit_is_lowered(nvml, handle)
        with self._lock:
            one = self._samples
            one.count += 1
            one.utilization += busy
            one.watts += watts
            one.celsius = max(one.celsius, celsius)
            one.hot += bool(reasons & HEAT)
            one.capped += lowered
            one.supply += bool(reasons & POWER_SUPPLY)


def _clock_reasons(nvml: Any, handle: Any) -> int:
    """As a bit mask; 0 where the driver does not tell. The function has two names, by the version of the library."""
    for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
        with suppress(Exception):
            return int(getattr(nvml, name)(handle))
    return 0


def _limit_is_lowered(nvml: Any, handle: Any) -> bool:
    """Whether someone has lowered the power limit. At the usual one, a busy GPU is often capped."""
    with suppress(Exception):
        usual = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle)
        return bool(nvml.nvmlDeviceGetEnforcedPowerLimit(handle) < usual)
    return False
