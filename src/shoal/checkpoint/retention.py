"""Which checkpoints stay: the newest few, and the best few by a metric. The newest whole one always does."""

import math
from pathlib import Path

from shoal.checkpoint.store import Checkpoint, list_whole, remove


def to_keep(checkpoints: list[Checkpoint], *, newest: int, best: int, metric: str) -> set[int]:
    """Steps of the checkpoints that stay; `checkpoints` is oldest first, a lower metric is better."""
    keep = {one.step for one in checkpoints[-max(1, newest) :]}
    measured = [one for one in checkpoints if math.isfinite(one.metrics.get(metric, math.nan))]
    return keep | {one.step for one in sorted(measured, key=lambda one: one.metrics[metric])[:best]}


def tidy(checkpoints: Path, *, newest: int, best: int, metric: str, written: int | None = None) -> list[int]:
    """Remove what need not stay; returns the steps removed. The one just `written` stays whatever else is there."""
    whole = list_whole(checkpoints)
    keep = to_keep(whole, newest=newest, best=best, metric=metric) | ({written} if written is not None else set())
    gone = [one for one in whole if one.step not in keep]
    for one in gone:
        remove(one)
    return [one.step for one in gone]
