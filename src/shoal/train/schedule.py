"""Learning rate schedules, as a factor of `train.lr`. A function of the step alone: resuming needs no state."""

import math
from collections.abc import Callable

from shoal.config.schema import ScheduleConfig, TrainConfig

Factor = Callable[[int], float]


def warmup_steps(warmup: int | float, total: int) -> int:
    """A number of steps; a float below one is a fraction of the total."""
    return round(warmup * total) if isinstance(warmup, float) and warmup < 1 else int(warmup)


def make_schedule(settings: ScheduleConfig, total: int) -> Factor:
    """The factor for steps 0 to `total` - 1: linear warmup to 1, then decay to `min_ratio` at the last step."""
    warmup = min(warmup_steps(settings.warmup, total), total)
    floor = settings.min_ratio
    decay_from = max(warmup, total - max(1, round(settings.decay * total))) if settings.name == "wsd" else warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if settings.name == "constant" or step < decay_from:
            return 1.0
        done = (step - decay_from + 1) / max(1, total - decay_from)
        remaining = (1 + math.cos(math.pi * done)) / 2 if settings.name == "cosine" else 1 - done
        return floor + (1 - floor) * remaining

    return factor


def peak_lr(train: TrainConfig) -> float:
    """`train.lr`, scaled with the global batch if `train.lr_scaling` says so."""
    if train.lr_scaling == "linear" and train.base_batch is not None:
        return train.lr * train.global_batch / train.base_batch
    return train.lr
