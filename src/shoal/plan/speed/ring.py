"""The cost of ring collectives: each rank sends to the next, and every link carries the same bytes.

`size` is always that of the full tensor: what each rank has after an all-gather, and before a reduce-scatter. Of its N
chunks, N − 1 travel over every link; an all-reduce is a reduce-scatter followed by an all-gather.
"""

from typing import Literal, get_args

Operation = Literal["all-reduce", "all-gather", "reduce-scatter"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


def ring_factor(operation: Operation, ranks: int) -> float:
    """The bytes that each link carries, as a multiple of the full tensor's."""
    once = (ranks - 1) / ranks
    return 2 * once if operation == "all-reduce" else once


def ring_seconds(
    operation: Operation, ranks: int, size: float, *, bytes_per_second: float, latency: float = 0.0
) -> float:
    """Seconds of one collective; `latency` is that of the operation, not of one hop."""
    return latency + ring_factor(operation, ranks) * size / bytes_per_second
