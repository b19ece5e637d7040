"""Partitions a model's blocks into pipeline stages. Arithmetic only."""

from collections.abc import Callable
from itertools import accumulate


def divide_blocks(blocks: int, stages: int, head: float) -> list[range]:
    """The blocks of each stage, in order: minimises the time of the slowest stage and balances the others.

    `head` is the cost of lm_head in blocks, added to the last stage. The embedding is a lookup and costs next to
    nothing, but of two equally good partitions the one with fewer blocks in the first stage is chosen.
    """
    assert 1 <= stages <= blocks, (blocks, stages)
    # Only the number of blocks in the last stage is open: whatever it leaves is best divided evenly over the others.
    last = _blocks_in_last_stage(blocks, stages, head) if stages > 1 else blocks
    small, larger = divmod(blocks - last, stages - 1) if stages > 1 else (0, 0)
    counts = [*[small] * (stages - 1 - larger), *[small + 1] * larger, last]
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def _blocks_in_last_stage(blocks: int, stages: int, head: float) -> int:
    """By bisection: with more blocks in the last stage it takes longer and the others less, and the sum of squares of
    all costs is convex."""
    others = stages - 1

    def most_before(last: int) -> int:
        return -(-(blocks - last) // others)

    def squares(last: int) -> float:
        small, larger = divmod(blocks - last, others)
        return (others - larger) * small**2 + larger * (small + 1) ** 2 + (last + head) ** 2

    limit = blocks - others  # each of the others has at least one
    crossing = _first(1, limit, lambda last: last + head >= most_before(last))
    slowest = min(max(most_before(last), last + head) for last in (max(1, crossing - 1), crossing))
    fewest = _first(1, limit, lambda last: most_before(last) <= slowest)
    most = _first(1, limit, lambda last: last + 1 + head > slowest)
    return _first(fewest, most, lambda last: squares(last + 1) > squares(last))


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The first of `low` to `high` for which `holds`, which then holds for all after it; `high` if there is none."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def bubble_share(stages: int, grad_accum_steps: int, chunks: int = 1) -> float:
    """The pipeline bubble as a share of the step, for 1F1B (`chunks` 1) and interleaved (2)."""
    idle = (stages - 1) / chunks
    return idle / (grad_accum_steps + idle)
