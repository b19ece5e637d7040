"""How long a collective takes on a ring: each rank sends to the next, and every link carries the same bytes.

`size` is the whole tensor everywhere: what each rank has after an all-gather, and before a reduce-scatter. Cut into N
parts, N − 1 of which have to travel over every link; an all-reduce is a reduce-scatter and then an all-gather.
"""

from typing import Literal, get_args

Operation = Literal["all-reduce", "all-gather", "reduce-scatter"]
OPERATIONS: tuple[Operation, ...] = get_args(Operation)


def ring_factor(operation: Operation, ranks: int) -> float:
    """The bytes that go over each link, as a multiple of the whole tensor's."""
    once = (ranks - 1) / ranks
    return 2 * once if operation == "all-reduce" else once


def ring_seconds(
    operation: Operation, ranks: int, size: float, *, bytes_per_second: float, latency: float = 0.0
) -> float:
    """The time of one collective; `latency` is that of the whole operation, not of one hop."""
    return latency + ring_factor(operation, ranks) * size / bytes_per_second
