"""The number of steps of a run."""

import pytest

from shoal.mistakes import UserMistake
from shoal.plan.batches import count_steps


@pytest.mark.parametrize(
    ("length", "steps"),
    [({"epochs": 2}, 25), ({"steps": 7}, 7), ({"tokens": 8000}, 10), ({"tokens": 8001}, 11), ({"tokens": 1}, 1)],
)
def test_a_length_in_epochs_steps_or_tokens_becomes_steps(length, steps):
    # 100 sequences of 100 loss tokens in batches of 8: an epoch is 12.5 steps, a step 800 tokens.
    given = {"epochs": None, "steps": None, "tokens": None, **length}
    assert count_steps(**given, sequences=100, loss_tokens=10_000, global_batch=8) == steps


def test_an_epoch_smaller_than_a_batch_is_a_mistake_that_says_what_to_do():
    with pytest.raises(
        UserMistake, match=r"1 epoch of 5 sequences give less than one step of train\.global_batch 8; lower it to 5"
    ):
        count_steps(epochs=1, steps=None, tokens=None, sequences=5, loss_tokens=50, global_batch=8)
