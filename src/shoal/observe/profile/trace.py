"""Reads a Chrome trace of torch.profiler: kernels with the time of their launch, operators by thread, our ranges."""

import gzip
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shoal.observe.profile.ranges import STEP

# Categories of what runs on a GPU.
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Event:
    """Something that ran, in seconds since an arbitrary point."""

    name: str
    begin: float
    end: float
    thread: int | str  # or stream
    launched: float | None = None  # of a kernel: when the host launched it


@dataclass(frozen=True)
class Allocation:
    """The memory of a device after something was allocated or freed."""

    at: float
    allocated: int  # bytes
    device: int  # -1: host


@dataclass(frozen=True)
class Trace:
    """What was recorded, in order of time."""

    kernels: list[Event] = field(default_factory=list)
    operators: list[Event] = field(default_factory=list)  # on the CPU, and ranges
    allocations: list[Allocation] = field(default_factory=list)

    @property
    def on_device(self) -> bool:
        """Whether kernels of a GPU were recorded, so that the CPU's operators only launch them."""
        return bool(self.kernels)

    def steps(self) -> list[Event]:
        """The steps that were recorded."""
        return [event for event in self.operators if event.name.startswith(STEP)]

    def ranges(self, name: str) -> list[tuple[float, float]]:
        """The intervals of a range of the training loop."""
        return [(event.begin, event.end) for event in self.operators if event.name == name]


def read_trace(path: Path) -> Trace:
    """The trace in a file that `export_chrome_trace` has written, compressed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return parse_trace(json.load(file)["traceEvents"])


def parse_trace(events: Iterable[Mapping[str, Any]]) -> Trace:
    """The trace in a list of Chrome's trace events, which are in microseconds."""
    launched: dict[int, float] = {}
    on_device: list[Mapping[str, Any]] = []
    found = Trace()
    for event in events:
        category = event.get("cat")
        if category in LAUNCHES:
            if (correlation := event.get("args", {}).get("correlation")) is not None:
                launched[correlation] = event["ts"] / 1e6
        elif category in ON_DEVICE and event.get("ph") == "X":
            on_device.append(event)
        elif category in ("cpu_op", "user_annotation") and event.get("ph") == "X":
            found.operators.append(_event(event))
        elif event.get("name") == "[memory]":
            values = event["args"]
            found.allocations.append(Allocation(event["ts"] / 1e6, values["Total Allocated"], values["Device Id"]))
    # A graph's kernels have the correlation of its launch.
    found.kernels.extend(_event(event, launched.get(event["args"].get("correlation"))) for event in on_device)
    found.kernels.sort(key=lambda event: event.begin)
    found.operators.sort(key=lambda event: (event.begin, -event.end))
    found.allocations.sort(key=lambda allocation: allocation.at)
    return found


def _event(event: Mapping[str, Any], launched: float | None = None) -> Event:
    begin = event["ts"] / 1e6
    return Event(event["name"], begin, begin + event.get("dur", 0.0) / 1e6, event.get("tid", 0), launched)
