"""Memory over the recorded steps, from the allocations in a trace."""

from typing import Any

from shoal.observe.profile.intervals import Interval
from shoal.observe.profile.trace import Trace

POINTS = 200  # of the timeline
GIB = 2**30


def memory_timeline(trace: Trace, window: Interval) -> dict[str, Any] | None:
    """The largest allocated memory in each of `POINTS` parts of the window; None if no allocation was recorded.

    On a GPU it is all that PyTorch has allocated. On a CPU it is relative to the beginning of the recording, because
    earlier allocations are not known there.
    """
    devices = {one.device for one in trace.allocations if one.device >= 0} if trace.on_device else {-1}
    allocations = [one for one in trace.allocations if one.device in devices]
    if not allocations:
        return None
    width = (window[1] - window[0]) / POINTS
    before = [one.allocated for one in allocations if one.at < window[0]]
    current = before[-1] if before else allocations[0].allocated
    parts: list[list[int]] = [[] for _ in range(POINTS)]
    for one in allocations:
        if window[0] <= one.at < window[1]:
            parts[min(POINTS - 1, int((one.at - window[0]) / width))].append(one.allocated)
    largest: list[int] = []
    for part in parts:
        largest.append(max([current, *part]))
        current = part[-1] if part else current
    peak = max(range(POINTS), key=lambda point: largest[point])
    return {
        "of": "device" if trace.on_device else "tensors allocated since the recording began",
        "peak_gib": round(largest[peak] / GIB, 6),
        "peak_at_seconds": round(peak * width, 9),
        "lowest_gib": round(min(largest) / GIB, 6),
        "seconds_per_point": round(width, 9),
        "gib": [round(value / GIB, 6) for value in largest],
    }
