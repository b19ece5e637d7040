"""Partitions a model's blocks into pipeline stages. Arithmetic only."""

from functools import cache
from math import inf


def divide_blocks(blocks: int, stages: int, head: float) -> list[range]:
    """The blocks of each stage, in order: minimises the time of the slowest stage and balances the others.

    `head` is the cost of lm_head in blocks, added to the last stage. The embedding is a lookup and costs next to
    nothing, but of two equally good partitions the one with fewer blocks in the first stage is chosen.
    """
    assert 1 <= stages <= blocks, (blocks, stages)

    @cache
    def slowest(first: int, left: int) -> float:
        """The minimal cost of the slowest of `left` stages for the blocks from `first` on."""
        if left == 1:
            return blocks - first + head
        counts = range(1, blocks - first - left + 2)
        return min(max(float(count), slowest(first + count, left - 1)) for count in counts)

    most = slowest(0, stages)

    @cache
    def most_balanced(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squares, blocks per stage) of the most balanced partition with no stage above `most`."""
        if left == 1:
            cost = blocks - first + head
            return (cost**2 if cost <= most else inf), (blocks - first,)
        found = []
        for count in range(1, min(int(most), blocks - first - left + 1) + 1):
            rest, counts = most_balanced(first + count, left - 1)
            found.append((count**2 + rest, (count, *counts)))
        return min(found, default=(inf, ()))

    counts = most_balanced(0, stages)[1]
    ends = [sum(counts[: index + 1]) for index in range(stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def bubble_share(stages: int, grad_accum_steps: int, chunks: int = 1) -> float:
    """The pipeline bubble as a share of the step, for 1F1B (`chunks` 1) and interleaved (2)."""
    idle = (stages - 1) / chunks
    return idle / (grad_accum_steps + idle)
