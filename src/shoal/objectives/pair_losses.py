"""The losses of preference tuning, from the log-probabilities of chosen and rejected answers. Of an unpaired answer,
the other one of its pair has no tokens.

Values are fp64, in the last dimension (chosen, rejected): a log-probability is the sum over thousands of tokens, and
the losses depend on small differences of them. The formulas and what the metrics mean are as in TRL.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# The mean log-probability of an answer is held below this: the odds of a certain answer are infinite.
HIGHEST = -1e-12


@dataclass(frozen=True)
class Answers:
    """The answers of pairs, … × 2. A pair without tokens is none: its loss must be finite and is not counted."""

    logps: Tensor  # summed over the tokens of the answer
    reference: Tensor  # the same of the reference model
    tokens: Tensor

    @property
    def ratios(self) -> Tensor:
        """Log-ratios of the policy and the reference."""
        return self.logps - self.reference

    def mean(self, sums: Tensor) -> Tensor:
        """Per token."""
        return sums / self.tokens.clamp(min=1)


@dataclass(frozen=True)
class Compared:
    """The loss of each pair, and what is reported of its answers."""

    losses: Tensor
    rewards: Tensor  # … × 2
    logps: Tensor  # … × 2: sums or means over tokens, whichever the loss is made of


PairLoss = Callable[[Answers], Compared]


def dpo(answers: Answers, beta: float) -> Compared:
    """Rafailov et al. 2023, equation 7."""
    rewards = beta * answers.ratios
    return Compared(-F.logsigmoid(_difference(rewards)), rewards, answers.logps)


def ipo(answers: Answers, beta: float) -> Compared:
    """Azar et al. 2023, equation 17, with means over tokens as in the paper's experiments. `beta` is its τ."""
    gap = _difference(answers.mean(answers.ratios)) - 1 / (2 * beta)
    return Compared(gap.square(), beta * answers.ratios, answers.logps)


def orpo(answers: Answers, beta: float) -> Compared:
    """Hong et al. 2024, equations 6 and 7: the cross-entropy of the chosen answer, and `beta` (the paper's λ) times the
    odds ratio."""
    means = answers.mean(answers.logps)
    log_odds = means - _log1mexp(means.clamp(max=HIGHEST))
    losses = -means[..., 0] - beta * F.logsigmoid(_difference(log_odds))
    return Compared(losses, beta * means, means)


def simpo(answers: Answers, beta: float, gamma: float) -> Compared:
    """Meng et al. 2024, equation 6."""
    means = answers.mean(answers.logps)
    rewards = beta * means
    return Compared(-F.logsigmoid(_difference(rewards) - gamma), rewards, means)


def apo_zero_unpaired(answers: Answers, beta: float, desirable_weight: float, undesirable_weight: float) -> Compared:
    """D'Oosterlinck et al. 2024, equation 7 for single answers: `kto` of TRL with a KL term of zero."""
    rewards = beta * answers.ratios
    chosen, rejected = (-rewards[..., 0]).sigmoid(), rewards[..., 1].sigmoid()
    each = torch.stack([desirable_weight * chosen, undesirable_weight * rejected], -1)
    return Compared(torch.where(answers.tokens > 0, each, 0.0).sum(-1), rewards, answers.logps)


PAIR_LOSSES: dict[str, Callable[..., Compared]] = {
    "dpo": dpo,
    "ipo": ipo,
    "orpo": orpo,
    "simpo": simpo,
    "apo_zero_unpaired": apo_zero_unpaired,
}


def _difference(both: Tensor) -> Tensor:
    return both[..., 0] - both[..., 1]


def _log1mexp(values: Tensor) -> Tensor:
    """log(1 - exp(values)) of negative values."""
    return (-values.expm1()).log()
