"""The objectives: the data they need and their options. Data and lookups only; `objectives/` has their losses."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectiveFacts:
    """A value of `train.objective`."""

    name: str
    pairs: bool = False  # trains on pairs of a chosen and a rejected answer, not on single documents
    unpaired: bool = False  # trains on single answers, each with a label: desirable or not
    encoder: bool = False  # trains a bidirectional encoder: every token attends to every other one of its example
    classes: bool = False  # trains on single examples, each with a class: `data.label`
    reference: bool = False  # compares with the log-probabilities of the model that training starts from
    # Keys of `train.preference` that it has, and their defaults.
    options: tuple[tuple[str, float], ...] = ()

    @property
    def of_answers(self) -> bool:
        """Whether the loss is a function of the log-probabilities of whole answers, not a sum over tokens."""
        return self.pairs or self.unpaired


_UNPAIRED = (("beta", 0.1), ("desirable_weight", 1.0), ("undesirable_weight", 1.0))

OBJECTIVES = {
    one.name: one
    for one in (
        ObjectiveFacts("causal_lm"),
        ObjectiveFacts("masked_lm", encoder=True),
        ObjectiveFacts("classify", encoder=True, classes=True),
        ObjectiveFacts("dpo", pairs=True, reference=True, options=(("beta", 0.1),)),
        ObjectiveFacts("ipo", pairs=True, reference=True, options=(("beta", 0.1),)),
        ObjectiveFacts("orpo", pairs=True, options=(("beta", 0.1),)),
        # Rewards are means over tokens, which are far smaller than sums: beta is larger. As in the paper.
        ObjectiveFacts("simpo", pairs=True, options=(("beta", 2.0), ("gamma", 1.0))),
        ObjectiveFacts("apo_zero_unpaired", unpaired=True, reference=True, options=_UNPAIRED),
        ObjectiveFacts("kto", unpaired=True, reference=True, options=_UNPAIRED),  # not built: config/unbuilt.py
    )
}


def objective_facts(name: str) -> ObjectiveFacts:
    """What is known of `train.objective`."""
    return OBJECTIVES[name]
