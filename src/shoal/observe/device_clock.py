"""Time device work without synchronizing: with CUDA events in the current stream, else with the host clock."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mark:
    """A point in the work of the device."""

    host: float
    event: torch.cuda.Event | None

    def reached(self) -> bool:
        """Whether the device has reached this point."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Wait until the device has reached this point, but not for work that was launched later."""
        if self.event is not None:
            self.event.synchronize()


def mark(device: torch.device) -> Mark:
    """Mark the point after all work that was launched so far."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
    return Mark(time.perf_counter(), event)


def seconds_between(first: Mark, second: Mark) -> float:
    """Device time between two marks that have been reached."""
    if first.event is not None and second.event is not None:
        milliseconds: float = first.event.elapsed_time(second.event)
        return milliseconds / 1000
    return second.host - first.host
