"""How long documents are: percentiles, and a histogram whose bins double."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bin:
    """Documents with at least `shortest` and at most `longest` tokens."""

    shortest: int
    longest: int
    documents: int


@dataclass(frozen=True)
class Lengths:
    """The lengths of documents in tokens, before any is truncated or split."""

    mean: float
    median: int
    p90: int
    p99: int
    max: int
    histogram: list[Bin]


def describe_lengths(lengths: np.ndarray) -> Lengths:
    """Percentiles (lengths that occur, none in between) and a histogram whose bins double."""
    median, p90, p99 = (int(one) for one in np.percentile(lengths, [50, 90, 99], method="higher"))
    shortest, longest = int(lengths.min()), int(lengths.max())
    lows = [1 << power for power in range(max(shortest.bit_length() - 1, 0), max(longest.bit_length(), 1))]
    counts, _ = np.histogram(lengths, [*lows, lows[-1] * 2])
    return Lengths(
        mean=round(float(lengths.mean()), 1),
        median=median,
        p90=p90,
        p99=p99,
        max=longest,
        histogram=[Bin(low, low * 2 - 1, int(count)) for low, count in zip(lows, counts, strict=True)],
    )
