"""Arithmetic of time intervals: sorted, disjoint (begin, end) pairs."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time, without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > begin:
            found.append((begin, end))
    return found


def subtract(these: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of `these` is in none of `others`; both are sorted and disjoint."""
    found: list[Interval] = []
    index = 0
    for begin, end in these:
        while index < len(others) and others[index][1] <= begin:
            index += 1
        at = index
        while at < len(others) and others[at][0] < end:
            if others[at][0] > begin:
                found.append((begin, others[at][0]))
            begin = max(begin, others[at][1])
            at += 1
        if end > begin:
            found.append((begin, end))
    return found


def clip(intervals: Iterable[Interval], window: Interval) -> list[Interval]:
    """The parts inside of `window`."""
    low, high = window
    clipped = ((max(begin, low), min(end, high)) for begin, end in intervals)
    return [(begin, end) for begin, end in clipped if end > begin]


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
