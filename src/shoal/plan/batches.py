"""Arithmetic of batches: the number of steps of a run, and batch sizes that divide."""

from math import isqrt

from shoal.mistakes import UserMistake


def nearest_multiples(value: int, unit: int) -> str:
    """The multiples of `unit` on either side of `value`, for an error message."""
    below = value // unit * unit
    return " and ".join(str(one) for one in (below, below + unit) if one > 0)


def divisors(value: int) -> list[int]:
    """The numbers that divide `value`, in order."""
    small = [one for one in range(1, isqrt(value) + 1) if value % one == 0]
    return small + [value // one for one in reversed(small) if one * one != value]


def count_steps(
    *, epochs: int | None, steps: int | None, tokens: int | None, sequences: int, loss_tokens: int, global_batch: int
) -> int:
    """Optimizer steps of the run; `loss_tokens` are those of all `sequences`."""
    if steps is not None:
        return steps
    if tokens is not None:
        return max(1, -(-tokens * sequences // (loss_tokens * global_batch)))
    assert epochs is not None
    total = epochs * sequences // global_batch
    if total < 1:
        raise UserMistake(
            f"{epochs} epoch{'s' if epochs > 1 else ''} of {sequences} sequences give less than one step of "
            f"train.global_batch {global_batch}; lower it to {epochs * sequences} or less, or set train.steps."
        )
    return total
