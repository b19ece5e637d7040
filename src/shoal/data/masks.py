"""Which tokens of an example masked language modelling hides, and what stands in their place. Without torch.

They are drawn from the seed and the example's position in the global order, so that neither world size nor micro-batch
nor a resume changes them.
"""

import math
from dataclasses import dataclass

import numpy as np

from shoal.config.schema import Config
from shoal.data.order import key_of
from shoal.data.sequences import LOSS_TOKEN
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake

TRAINING, EVALUATION = "masks", "evaluation masks"


@dataclass(frozen=True)
class Masks:
    """What is drawn, from what."""

    seed: int
    ratio: float
    as_mask: float  # the share of predicted tokens that the mask token replaces
    as_random: float  # the share that a random token replaces
    mask: int  # the id of the mask token
    ordinary: np.ndarray  # the ids that a random token may have

    def draw(
        self, tokens: np.ndarray, eligible: np.ndarray, position: int, use: str = TRAINING
    ) -> tuple[np.ndarray, np.ndarray]:
        """The tokens as the model sees them, and the indices of those that it predicts. `eligible`: which it may.
        `position`: of the example in the global order, or its number for another `use`."""
        count = masked_count(len(eligible), self.ratio)
        # Raw bits, whose order no version of numpy changes.
        key = key_of("shoal", use, self.seed, position)
        drawn = np.random.Philox(key=key).random_raw(len(eligible) + 2 * count)
        chosen = np.sort(eligible[np.argsort(drawn[: len(eligible)], kind="stable")[:count]])
        share = drawn[len(eligible) : len(eligible) + count] / 2.0**64
        seen = tokens.astype(np.int64)
        seen[chosen[share < self.as_mask]] = self.mask
        changed = (share >= self.as_mask) & (share < self.as_mask + self.as_random)
        seen[chosen[changed]] = self.ordinary[drawn[len(eligible) + count :][changed] % np.uint64(len(self.ordinary))]
        return seen, chosen


def make_masks(config: Config, tokenizer: Tokenizer) -> Masks:
    """The masks of a run. A UserMistake if the tokenizer has no mask token."""
    if tokenizer.mask is None:
        raise UserMistake(
            f"train.objective masked_lm: the tokenizer {tokenizer.name} has no mask token; use one that has, or add "
            "one with model.add_tokens: [<mask>]."
        )
    masking = config.train.masking
    ordinary = np.setdiff1d(np.arange(tokenizer.size), sorted(tokenizer.special))
    return Masks(config.seed, config.train.mask_ratio, masking.mask, masking.random, tokenizer.mask, ordinary)


def masked_count(eligible: int, ratio: float) -> int:
    """How many tokens of an example are predicted: a number that is known before they are drawn."""
    return min(eligible, max(1, math.floor(eligible * ratio + 0.5)))


def total_masked(eligible: np.ndarray, ratio: float) -> int:
    """The same of many examples."""
    each = np.maximum(1, np.floor(eligible * ratio + 0.5))
    return int(np.minimum(eligible, each).sum(dtype=np.int64))


def eligible_tokens(flags: np.ndarray) -> np.ndarray:
    """The tokens that may be predicted: as `Sequences.loss_tokens` counts them, all of the text but a first token.
    `flags`: of a sequence, whose last token is no input."""
    return 1 + np.flatnonzero(flags[1:-1] & LOSS_TOKEN)


def loss_share(config: Config) -> float:
    """Of the tokens that may count in the loss, the share that does."""
    return config.train.mask_ratio if config.train.objective == "masked_lm" else 1.0
