"""How a model's blocks are divided into the stages of a pipeline. Arithmetic only."""

from functools import cache
from math import inf


def divide_blocks(blocks: int, stages: int, head: float) -> list[range]:
    """The blocks of each stage, in order, so that the slowest stage is as fast as can be, and the others even.

    `head` is what the head costs, in blocks: it stands behind the last stage's. An embedding is looked up and costs
    next to nothing, but where two divisions are equally good the first stage, which has it, gets fewer blocks.
    """
    assert 1 <= stages <= blocks, (blocks, stages)

    @cache
    def slowest(first: int, left: int) -> float:
        """What the slowest of `left` stages takes at least, for the blocks from `first` on."""
        if left == 1:
            return blocks - first + head
        counts = range(1, blocks - first - left + 2)
        return min(max(float(count), slowest(first + count, left - 1)) for count in counts)

    most = slowest(0, stages)

    @cache
    def evenest(first: int, left: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squares, blocks of each) of the most even division in which no stage takes longer than `most`."""
        if left == 1:
            cost = blocks - first + head
            return (cost**2 if cost <= most else inf), (blocks - first,)
        found = []
        for count in range(1, min(int(most), blocks - first - left + 1) + 1):
            rest, counts = evenest(first + count, left - 1)
            found.append((count**2 + rest, (count, *counts)))
        return min(found, default=(inf, ()))

    counts = evenest(0, stages)[1]
    ends = [sum(counts[: index + 1]) for index in range(stages)]
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def bubble_share(stages: int, grad_accum_steps: int, chunks: int = 1) -> float:
    """The share of a step in which a device of the pipeline waits, for 1F1B (chunks 1) and interleaved (2)."""
    idle = (stages - 1) / chunks
    return idle / (grad_accum_steps + idle)
