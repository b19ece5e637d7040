"""Fits latency and bandwidth of a link to measured times."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Fit:
    """seconds = latency + ring bytes / bytes_per_second."""

    latency: float
    bytes_per_second: float
    error: float  # median relative deviation of the measured times from the line

    def seconds(self, ring_bytes: float) -> float:
        return self.latency + ring_bytes / self.bytes_per_second


def fit_link(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The least-squares line through (ring bytes, seconds), weighted by relative error.

    Relative, because times span five orders of magnitude: with absolute errors the largest message alone would decide,
    and the latency would be arbitrary. None if the points do not determine a line.
    """
    if len({ring_bytes for ring_bytes, _ in points}) < 2:
        return None
    weights = [1 / seconds**2 for _, seconds in points]
    total = sum(weights)
    x = sum(weight * point[0] for weight, point in zip(weights, points, strict=True))
    xx = sum(weight * point[0] ** 2 for weight, point in zip(weights, points, strict=True))
    t = sum(weight * point[1] for weight, point in zip(weights, points, strict=True))
    xt = sum(weight * point[0] * point[1] for weight, point in zip(weights, points, strict=True))
    determinant = total * xx - x * x
    latency = (xx * t - x * xt) / determinant
    per_byte = (total * xt - x * t) / determinant
    if latency < 0:  # latency cannot be negative: the best line through the origin instead
        latency, per_byte = 0.0, xt / xx
    if per_byte <= 0:  # larger messages were not slower: noise, or sizes too small
        return None
    line = Fit(latency, 1 / per_byte, 0.0)
    errors = [abs(line.seconds(ring_bytes) / seconds - 1) for ring_bytes, seconds in points]
    return Fit(line.latency, line.bytes_per_second, median(errors))
