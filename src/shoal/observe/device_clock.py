"""When the device did something, without asking it to stop: on CUDA by events in its stream, elsewhere by the clock."""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Mark:
    """A moment of the device's time."""

    host: float
    event: torch.cuda.Event | None

    def reached(self) -> bool:
        """Whether the device has come this far."""
        return self.event is None or bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until the device has come this far; not until it has done all that it was given since."""
        if self.event is not None:
            self.event.synchronize()


def mark(device: torch.device) -> Mark:
    """Now: after everything the device has been given so far."""
    event = None
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))
    return Mark(time.perf_counter(), event)


def seconds_between(first: Mark, second: Mark) -> float:
    """The device's time from one mark to a later one that it has reached."""
    if first.event is not None and second.event is not None:
        milliseconds: float = first.event.elapsed_time(second.event)
        return milliseconds / 1000
    return second.host - first.host
