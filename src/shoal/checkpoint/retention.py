"""Which checkpoints stay: the newest few, the best few by a metric, every so-manieth. The newest whole one always."""

import math
from contextlib import suppress
from pathlib import Path

from shoal.checkpoint.store import Checkpoint, clear_removed, list_whole, remove


def to_keep(
    checkpoints: list[Checkpoint], *, newest: int, best: int, metric: str, every: int | None = None
) -> set[int]:
    """Steps of the checkpoints that stay; `checkpoints` is oldest first, a lower metric is better."""
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
    """Remove what need not stay; returns the steps removed. The one just `written` stays whatever else is there."""
    whole = list_whole(checkpoints)
    keep = to_keep(whole, newest=newest, best=best, metric=metric, every=every)
    gone = [one for one in whole if one.step not in keep and one.step != written]
    clear_removed(checkpoints)
    for one in gone:
        with suppress(OSError):  # what cannot be removed now is tried again after the next save
            remove(one)
    return [one.step for one in gone]
