"""The optimizers of a custom loop. Several take turns: each has gradients, a schedule and a loss of its own.

A step of the run is a batch of `run.steps`. In it one optimizer updates its parameters, or several in turn.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.mistakes import UserMistake
from shoal.optim.given import GivenOptimizer
from shoal.parallel.placement import Placement
from shoal.parallel.ranks import Ranks
from shoal.train.custom_schedule import merged_state, schedule_numbers
from shoal.train.step import StepResult, TrainStep

FIELDS = ("loss", "weight", "grad_norm", "lr")  # of a turn, as `Turn.latest` holds them; the loss times its weight


@dataclass
class Turn:
    """One optimizer, and what belongs to it."""

    name: str  # "" if it is the only one
    optimizer: GivenOptimizer
    step: TrainStep
    schedule: Any
    latest: Tensor | None = None  # `FIELDS` of its last update, which sum to those of all ranks
    norm: Tensor | None = None  # of its last update
    lr: float = 0.0  # of its last update

    @property
    def by_metric(self) -> bool:
        """Whether the script advances the schedule itself."""
        return isinstance(self.schedule, ReduceLROnPlateau)

    def advance_schedule(self) -> None:
        if self.schedule is not None and not self.by_metric:
            self.schedule.step()

    def record(self, result: StepResult, lr: float, ranks: Ranks) -> None:
        """Remember an update, for the lines of the log after it."""
        loss, once = result.sums[:1], float(ranks.first)  # what is the same on all ranks is counted once
        weight = result.sums[1:2] if result.weight is None else loss.new_tensor([result.weight * once])
        alike = torch.stack([result.norm.to(loss), loss.new_tensor(lr)]) * once
        self.latest, self.norm, self.lr = torch.cat([loss, weight, alike]), result.norm, lr

    def numbers(self, ranks: Ranks) -> dict[str, Any]:
        """What a checkpoint has of this turn, besides tensors. Collective."""
        latest = ranks.sum(_or_zeros(self.latest, ranks).clone()).tolist()  # which sums in place
        return {
            "groups": self.optimizer.groups(),
            "schedule": schedule_numbers(self.schedule),
            "latest": latest if all(map(math.isfinite, latest)) else [0.0] * len(FIELDS),
        }

    def load(self, stored: Mapping[str, Any], ranks: Ranks) -> None:
        self.optimizer.load_groups(stored["groups"])
        if self.schedule is not None:
            self.schedule.load_state_dict(merged_state(self.schedule.state_dict(), stored["schedule"]))
        self.latest = self.norm = None
        latest = stored.get("latest", [0.0] * len(FIELDS))
        if latest[1]:
            values = torch.tensor(latest, dtype=torch.float64, device=ranks.device)
            self.latest, self.norm, self.lr = values * float(ranks.first), values[2].float(), latest[3]


class Turns:
    """The optimizers of a run as one, for its checkpoints and its log."""

    def __init__(self, turns: Sequence[Turn], ranks: Ranks) -> None:
        self.turns = turns
        self.ranks = ranks
        self.sums = ("loss", "weight", *(f"{field}_{turn.name}" for turn in turns for field in FIELDS))

    @property
    def several(self) -> bool:
        return len(self.turns) > 1

    @property
    def first(self) -> Turn:
        return self.turns[0]

    @property
    def names(self) -> str:
        """The classes of the optimizers."""
        return ", ".join(type(turn.optimizer.optimizer).__name__ for turn in self.turns)

    def of(self, optimizer: Any) -> Turn:
        for turn in self.turns:
            if turn.optimizer.optimizer is optimizer:
                return turn
        which = "one of the optimizers" if self.several else "the optimizer"
        raise UserMistake(f"run.step takes {which} that run.prepare returned.")

    def state(self) -> dict[str, Tensor]:
        return {key: one for turn in self.turns for key, one in turn.optimizer.state().items()}

    def empty_state(self, stored: Mapping[str, tuple[int, ...]], placement: Placement) -> dict[str, Tensor]:
        return {key: one for turn in self.turns for key, one in turn.optimizer.empty_state(stored, placement).items()}

    def numbers(self) -> dict[str, Any]:
        found = [turn.numbers(self.ranks) for turn in self.turns]
        return {"turns": found} if self.several else found[0]

    def load(self, stored: Mapping[str, Any]) -> None:
        found = stored.get("turns", [stored])
        if len(found) != len(self.turns):
            raise UserMistake(f"The checkpoint has {len(found)} optimizers, but run.prepare got {len(self.turns)}.")
        for turn, numbers in zip(self.turns, found, strict=True):
            turn.load(numbers, self.ranks)

    def result(self, updates: Sequence[StepResult]) -> tuple[StepResult, float]:
        """The updates of a step as one, and its learning rate. With several optimizers its loss and norm are those of
        the first one's last turn, so that they are comparable from step to step; the others' follow in the sums."""
        if not self.several:
            return updates[-1], self.first.lr
        main = next((turn for turn in self.turns if turn.latest is not None), self.first)
        assert main.latest is not None, "a step has an update"
        assert main.norm is not None
        usable = updates[0].usable
        for one in updates[1:]:
            usable = usable & one.usable
        sums = torch.cat([main.latest[:2], *(_or_zeros(turn.latest, self.ranks) for turn in self.turns)])
        return StepResult(sums, None, main.norm, usable), main.lr

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Each optimizer's loss, gradient norm and learning rate in its last turn, for a line of the log."""
        found: dict[str, float] = {}
        for turn in self.turns:
            total, weight, norm, lr = (sums[f"{field}_{turn.name}"] for field in FIELDS)
            if weight:
                values = {"loss": total / weight, "grad_norm": norm, "lr": lr}
                found |= {f"{field}_{turn.name}": value for field, value in values.items()}
        return found


def _or_zeros(latest: Tensor | None, ranks: Ranks) -> Tensor:
    return torch.zeros(len(FIELDS), dtype=torch.float64, device=ranks.device) if latest is None else latest
