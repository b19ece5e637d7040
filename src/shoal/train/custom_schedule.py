"""A learning rate schedule that the user made: what can be one, and its numbers in a checkpoint."""

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from shoal.mistakes import UserMistake

Per = Literal["step", "epoch"]  # after what a schedule advances


def named_schedules(schedule: Any, optimizers: Mapping[str, Any]) -> dict[str, Any]:
    """The schedule of each optimizer, by its name; None: it has none."""
    if schedule is None:
        return dict.fromkeys(optimizers)
    if isinstance(schedule, dict):
        if unknown := [name for name in schedule if name not in optimizers]:
            raise UserMistake(f"There is a schedule {unknown[0]!r}, but no optimizer of that name.")
        return {name: schedule.get(name) for name in optimizers}
    found = list(schedule) if isinstance(schedule, tuple | list) else [schedule]
    if len(found) != len(optimizers):
        raise UserMistake(
            f"There are {len(optimizers)} optimizers and {len(found)} schedules; give one for each, or None in its "
            "place: they belong together in their order, or by the keys of a dict."
        )
    return dict(zip(optimizers, found, strict=True))


def check_per(per: Any) -> None:
    if per not in get_args(Per):
        raise UserMistake(f"schedule_per is {per!r}, but must be 'step' or 'epoch': after what the schedule advances.")


def check_schedule(schedule: Any, optimizer: Any) -> None:
    if schedule is None:
        return
    if not hasattr(schedule, "state_dict") or not hasattr(schedule, "step"):
        raise UserMistake(f"run.prepare takes a schedule of torch.optim.lr_scheduler, not a {type(schedule).__name__}.")
    if getattr(schedule, "optimizer", optimizer) is not optimizer:
        raise UserMistake("The schedule belongs to another optimizer than the one that you pass to run.prepare.")


def schedule_numbers(schedule: Any) -> Any:
    """The numbers in the state of a schedule, as JSON has them: all else is the script's."""
    return {} if schedule is None else _filtered(schedule.state_dict())


def _filtered(value: Any) -> Any:
    if isinstance(value, dict):
        found = {key: _filtered(one) for key, one in value.items() if isinstance(key, str) and type(one) is not object}
        return {key: one for key, one in found.items() if one is not None}
    if isinstance(value, list | tuple):
        inner = [_filtered(one) for one in value]
        return None if any(one is None for one in inner) else inner
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return value if isinstance(value, int | float | bool) else None


def merged_state(own: Any, stored: Any) -> Any:
    """`own` state of a schedule with the numbers that are `stored` in place of its own."""
    if isinstance(own, dict) and isinstance(stored, dict) and stored:
        return {key: merged_state(value, stored[key]) if key in stored else value for key, value in own.items()}
    if isinstance(own, list) and isinstance(stored, list) and len(own) == len(stored):
        return [merged_state(one, other) for one, other in zip(own, stored, strict=True)]
    if isinstance(own, dict):
        return own
    return stored
