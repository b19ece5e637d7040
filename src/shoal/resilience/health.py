"""Whether a run is healthy: non-finite losses and loss spikes, and the decision what to do about them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from shoal.config.schema_train import NanConfig, SpikeConfig, TrainConfig
from shoal.mistakes import RunFailed


class Diverged(RunFailed):
    """The run failed: losses or gradients are non-finite, and `train.on_nan` says to stop or rollbacks do not help."""


@dataclass(frozen=True)
class StepMetrics:
    """The metrics of one step. The same on every rank."""

    step: int
    loss: float
    norm: float
    usable: bool  # False: the step was skipped
    sums: tuple[float, ...] = ()  # of the objective


class Action(Enum):
    CONTINUE = "continue"
    SKIP = "skip"  # continue: the device has skipped the update of these steps already
    ROLL_BACK = "roll back"
    STOP = "stop"


@dataclass(frozen=True)
class Decision:
    """How the run goes on, and the steps that are the reason."""

    action: Action
    steps: tuple[int, ...] = ()

    @property
    def continues(self) -> bool:
        """Whether the next step follows."""
        return self.action in (Action.CONTINUE, Action.SKIP)


class Health:
    """Decides from the metrics of every step. They are the same on every rank, so all ranks decide the same.

    `sequences_of` names the sequences of a step, for warnings. With `scaled`, an overflowing gradient is left to the
    loss scaler and is no sign of divergence.
    """

    def __init__(
        self,
        train: TrainConfig,
        *,
        scaled: bool,
        sequences_of: Callable[[int], str],
        warn: Callable[[str], None],
    ) -> None:
        self.limit = train.on_nan if isinstance(train.on_nan, NanConfig) else NanConfig(action=train.on_nan)
        spikes = spike_settings(train.on_spike)
        self.spikes, self.skips_spikes = SpikeDetector(spikes.sigma), spikes.action == "skip"
        self.scaled = scaled
        self.sequences_of = sequences_of
        self.warn = warn

    def decide(self, steps: Sequence[StepMetrics], bad: list[int], losses: dict[str, float]) -> Decision:
        """How to go on after `steps`, as `train.on_nan` says. `bad` are the latest consecutive non-finite steps,
        `losses` the statistics of the spike detector; both are updated."""
        bad_now: list[StepMetrics] = []
        for one in steps:
            if not self._is_bad(one):
                bad.clear()
                self._check_spike(one, losses)
                continue
            bad_now.append(one)
            bad.append(one.step)
            if len(bad) >= self.limit.after and self.limit.action != "skip":
                return Decision(Action.ROLL_BACK if self.limit.action == "rollback" else Action.STOP, tuple(bad))
        if not bad_now:
            return Decision(Action.CONTINUE)
        # An infinite loss may have finite gradients.
        skipped = "" if any(one.usable for one in bad_now) else "; no weights were updated"
        self.warn(
            f"non-finite loss or gradient in {len(bad_now)} {'step' if len(bad_now) == 1 else 'steps'} up to step "
            f"{steps[-1].step}, the last with {self.sequences_of(bad_now[-1].step)}{skipped}."
        )
        return Decision(Action.SKIP, tuple(one.step for one in bad_now))

    def _is_bad(self, one: StepMetrics) -> bool:
        overflow = not math.isfinite(one.norm) and not self.scaled
        return overflow or not math.isfinite(one.loss)

    def _check_spike(self, one: StepMetrics, losses: dict[str, float]) -> None:
        height = self.spikes.update(one.loss, losses)
        if height is not None:
            skipped = self.skips_spikes and not one.usable
            self.warn(
                f"loss spike at step {one.step}: {one.loss:.4f} is {height:.1f} sigma above the recent mean. The step "
                f"had {self.sequences_of(one.step)}{' and was skipped' if skipped else ''}."
            )


def spike_settings(setting: str | SpikeConfig) -> SpikeConfig:
    """`train.on_spike` as a config block."""
    return setting if isinstance(setting, SpikeConfig) else SpikeConfig.model_validate({"action": setting})


class SpikeDetector:
    """Keeps a moving mean and variance of the loss, and reports losses far above the mean."""

    decay, warmup = 0.98, 20

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma

    def update(self, loss: float, statistics: dict[str, float]) -> float | None:
        """How many standard deviations `loss` is above the recent mean, if that is a spike. Else it is added to the
        `statistics`."""
        if not math.isfinite(loss):
            return None
        seen, mean, variance = (statistics.get(name, 0.0) for name in ("seen", "mean", "variance"))
        deviation = math.sqrt(variance)
        height = (loss - mean) / deviation if deviation > 0 else 0.0
        if seen >= self.warmup and height > self.sigma:
            return height  # not included: a spike must not raise the threshold
        weight = max(1 - self.decay, 1 / (seen + 1))
        change = loss - mean
        statistics["seen"], statistics["mean"] = seen + 1, mean + weight * change
        statistics["variance"] = (1 - weight) * (variance + weight * change * change)
        return None


class SpikeGuard:
    """The same on the device, where a step can be skipped without waiting for the host."""

    def __init__(self, sigma: float, device: torch.device) -> None:
        self.sigma = sigma
        self.statistics = torch.zeros(3, dtype=torch.float64, device=device)  # seen, mean, variance

    def accepts(self, loss: Tensor) -> Tensor:
        """Whether `loss` is not a spike."""
        seen, mean, variance = self.statistics
        spike = (seen >= SpikeDetector.warmup) & (variance > 0) & (loss - mean > self.sigma * variance.sqrt())
        counted = seen + 1
        weight = (1 / counted).clamp(min=1 - SpikeDetector.decay)
        change = loss - mean
        after = torch.stack([counted, mean + weight * change, (1 - weight) * (variance + weight * change * change)])
        self.statistics = torch.where(spike | ~loss.isfinite(), self.statistics, after)
        accepted: Tensor = ~spike
        return accepted

    def state(self) -> dict[str, Tensor]:
        return {"numbers": self.statistics}

    def load(self, state: dict[str, Tensor]) -> None:
        if state:
            self.statistics.copy_(state["numbers"])
