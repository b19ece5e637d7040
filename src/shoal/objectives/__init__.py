"""Training objectives. `objectives.objective` is the contract."""

from collections.abc import Callable

from shoal.config.schema import Config
from shoal.objectives.causal_lm import CausalLM
from shoal.objectives.objective import Objective
from shoal.objectives.preference import Preference
from shoal.objectives.unpaired import Unpaired

__all__ = ["OBJECTIVES", "Objective", "find_objective"]

OBJECTIVES: dict[str, Callable[[Config], Objective]] = {
    "causal_lm": lambda config: CausalLM(),
    **dict.fromkeys(("dpo", "ipo", "orpo", "simpo"), Preference),
    "apo_zero_unpaired": Unpaired,
}


def find_objective(config: Config) -> Objective:
    """The objective that `train.objective` names, for this run."""
    return OBJECTIVES[config.train.objective](config)
