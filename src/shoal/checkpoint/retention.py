"""Checkpoint retention: keeps the newest few, the best few by a metric, and every n-th step.

The newest complete checkpoint is never removed.
"""

import math
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.store import Checkpoint, clear_removed, list_complete, remove


def to_keep(
    checkpoints: list[Checkpoint], *, newest: int, best: int, metric: str, every: int | None = None
) -> set[int]:
    """Return the steps of the checkpoints to keep; `checkpoints` is oldest first, a lower metric is better."""
    keep = {one.step for one in checkpoints[-max(1, newest) :]}
    measured = [one for one in checkpoints if math.isfinite(one.metrics.get(metric, math.nan))]
    keep |= {one.step for one in sorted(measured, key=lambda one: one.metrics[metric])[:best]}
    return keep | {one.step for one in checkpoints if every is not None and one.step % every == 0}


def tidy(
    checkpoints: Path,
    *,
    newest: int,
    best: int,
    metric: str,
    every: int | None = None,
    written: int | None = None,
) -> list[int]:
    """Remove checkpoints that are not to be kept and return their steps. The step just `written` is always kept."""
    complete = list_complete(checkpoints)
    keep = to_keep(complete, newest=newest, best=best, metric=metric, every=every)
    removed = [one for one in complete if one.step not in keep and one.step != written]
    clear_removed(checkpoints)
    for one in removed:
        with suppress(OSError):  # a failed removal is retried after the next save
            remove(one)
    return [one.step for one in removed]
