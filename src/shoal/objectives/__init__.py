"""Training objectives. `objectives.objective` is the contract."""

from collections.abc import Callable, Sequence

from shoal.config.schema import Config
from shoal.data.tokenizer_base import Tokenizer
from shoal.objectives.causal_lm import CausalLM
from shoal.objectives.classify import Classify
from shoal.objectives.masked_lm import MaskedLM
from shoal.objectives.objective import Objective
from shoal.objectives.preference import Preference
from shoal.objectives.unpaired import Unpaired

__all__ = ["OBJECTIVES", "Objective", "find_objective"]

# Made from the config, the tokenizer and the names of the classes.
OBJECTIVES: dict[str, Callable[[Config, Tokenizer | None, Sequence[str]], Objective]] = {
    "causal_lm": lambda config, tokenizer, classes: CausalLM(),
    "masked_lm": lambda config, tokenizer, classes: MaskedLM(config, tokenizer),
    "classify": lambda config, tokenizer, classes: Classify(config, classes),
    **dict.fromkeys(("dpo", "ipo", "orpo", "simpo"), lambda config, tokenizer, classes: Preference(config)),
    "apo_zero_unpaired": lambda config, tokenizer, classes: Unpaired(config),
}


def find_objective(
    config: Config, tokenizer: Tokenizer | None = None, classes: Sequence[str] | None = None
) -> Objective:
    """The objective that `train.objective` names, for this run. Without a tokenizer it has a loss, but no masks;
    without the names of the `classes`, no metrics of them."""
    return OBJECTIVES[config.train.objective](config, tokenizer, classes or ())
