"""Training objectives. `objectives.objective` is the contract."""

from shoal.objectives.causal_lm import CausalLM
from shoal.objectives.objective import Objective

__all__ = ["OBJECTIVES", "Objective", "find_objective"]

OBJECTIVES: dict[str, Objective] = {one.name: one for one in (CausalLM(),)}


def find_objective(name: str) -> Objective:
    """The objective that `train.objective` names."""
    return OBJECTIVES[name]
