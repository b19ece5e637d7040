"""Learning rate schedules, as a factor of `train.lr`. A function of the step alone: resuming needs no state."""

import math
from collections.abc import Callable

from shoal.config.schema import Config, ScheduleConfig, TrainConfig

Factor = Callable[[int], float]
# A run with fewer steps gets a warning.
FEW_STEPS = 50


def warmup_steps(warmup: int | float, total: int) -> int:
    """A number of steps; a float below one is a fraction of the total."""
    return round(warmup * total) if isinstance(warmup, float) and warmup < 1 else int(warmup)


def make_schedule(settings: ScheduleConfig, total: int) -> Factor:
    """The factor for steps 0 to `total` - 1: linear warmup to 1, then decay to `min_ratio` at the last step."""
    total = settings.total_steps or total
    warmup = min(warmup_steps(settings.warmup, total), total)
    floor = settings.min_ratio
    decay_from = max(warmup, total - max(1, round(settings.decay * total))) if settings.name == "wsd" else warmup

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if settings.name == "constant" or step < decay_from:
            return 1.0
        done = min(1.0, (step - decay_from + 1) / max(1, total - decay_from))
        remaining = (1 + math.cos(math.pi * done)) / 2 if settings.name == "cosine" else 1 - done
        return floor + (1 - floor) * remaining

    return factor


def doubts(config: Config, steps: int, sequences: int | None) -> list[str]:
    """Warnings of a run that is probably too short, or mostly warmup. `sequences` are those of the training set; None:
    unknown."""
    train, found = config.train, []
    warmup = warmup_steps(train.schedule.warmup, train.schedule.total_steps or steps)
    if steps < FEW_STEPS and train.steps is None:
        length = f"train.epochs {train.epochs}" if train.tokens is None else f"train.tokens {train.tokens:,}"
        more = ""
        smaller = max(1, steps * train.global_batch // (2 * FEW_STEPS))
        if smaller < train.global_batch:
            more = f"; train.global_batch {smaller} would give about {steps * train.global_batch // smaller}"
        of = "" if sequences is None else f" of {sequences:,} sequences"
        found.append(
            f"the run has only {steps} {'step' if steps == 1 else 'steps'}: {length}{of}, {train.global_batch} per "
            f"step (train.global_batch){more}."
        )
    if warmup > steps:
        found.append(
            f"train.schedule.warmup {warmup} is longer than the run and was reduced to its {steps} steps: the learning "
            "rate rises until the end. Give a fraction of the run, such as 0.05."
        )
    elif warmup > steps / 2:
        found.append(
            f"train.schedule.warmup takes {warmup} of the run's {steps} steps; give a fraction of them, such as 0.05."
        )
    return found


def peak_lr(train: TrainConfig) -> float:
    """`train.lr`, scaled with the global batch if `train.lr_scaling` says so."""
    return train.lr * lr_scale(train)


def lr_scale(train: TrainConfig) -> float:
    """What `train.lr_scaling` multiplies the learning rate by."""
    if train.lr_scaling == "none":
        return 1.0
    assert train.base_batch is not None, "the schema demands it"
    ratio = train.global_batch / train.base_batch
    return math.sqrt(ratio) if train.lr_scaling == "sqrt" else ratio


def describe_lr_scale(train: TrainConfig, batch: str) -> str:
    """`global_batch 16 / base_batch 8`, with `batch` for the first name."""
    ratio = f"{batch} {train.global_batch} / base_batch {train.base_batch}"
    return f"√({ratio})" if train.lr_scaling == "sqrt" else ratio
