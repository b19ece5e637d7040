import numpy as np
import pytest

from shoal.data.order import ShuffledOrder, permute
from shoal.mistakes import UserMistake


@pytest.mark.parametrize("key", [0, 1, 2**64 - 1, 2**70 + 5])
def test_permute_is_a_bijection_for_any_size(key: int) -> None:
    for size in [*range(1, 70), 127, 128, 129, 1000, 1023, 1025, 4097, 65_537]:
        assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


def test_permute_gives_the_same_answer_for_one_position_as_for_all() -> None:
    whole = permute(np.arange(1001), 1001, 42)
    some = np.array([1000, 3, 3, 0])
    assert permute(some, 1001, 42).tolist() == whole[some].tolist()
    assert permute(np.array([], dtype=np.int64), 7, 1).tolist() == []


def test_permute_reaches_sizes_that_no_list_could_have() -> None:
    size = 10**15 + 7
    values = permute(np.arange(1000) + size - 1000, size, 3)
    assert len(set(values.tolist())) == 1000
    assert values.min() >= 0
    assert values.max() < size
    assert values.std() > size / 5


def test_permute_mixes() -> None:
    size, keys = 1000, 400
    table = np.stack([permute(np.arange(size), size, key) for key in range(keys)])
    # Where one position lands over many keys: twenty bins, chi-square with 19 degrees of freedom (99.99 %: 52).
    for position in (0, 1, 499, 999):
        seen = np.bincount(table[:, position] * 20 // size, minlength=20)
        assert ((seen - keys / 20) ** 2 / (keys / 20)).sum() < 52
    # Fixed points: one per permutation on average. Neighbours: adjacent again as seldom as by chance (about two).
    assert 0.7 < (table == np.arange(size)).sum() / keys < 1.3
    assert 1.4 < (np.abs(np.diff(table, axis=1)) == 1).sum() / keys < 2.6
    # No trend along the positions, and none from one key to the next.
    assert abs(np.corrcoef(np.arange(size), table[0])[0, 1]) < 0.15
    assert abs(np.corrcoef(table[0], table[1])[0, 1]) < 0.15


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_small_sizes_see_all_their_permutations(size: int) -> None:
    seen = {tuple(permute(np.arange(size), size, key).tolist()) for key in range(400)}
    expected = {2: 2, 3: 6, 4: 24, 5: 120}[size]
    assert len(seen) >= expected * 0.5
    firsts = np.bincount([permute(np.array([0]), size, key)[0] for key in range(400)], minlength=size)
    assert firsts.min() > 400 / size * 0.7


def test_each_epoch_is_another_permutation_of_the_training_sequences() -> None:
    order = ShuffledOrder(57, seed=5, validation=0.1)
    epochs = [
        order.training_sequences(epoch * order.training_count, order.training_count).tolist() for epoch in range(4)
    ]
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert len({tuple(sorted(epoch)) for epoch in epochs}) == 1


def test_positions_may_be_requested_in_any_spans() -> None:
    order = ShuffledOrder(11, seed=3)
    whole = order.training_sequences(0, 50)
    for first, count in [(0, 1), (10, 2), (5, 30), (49, 1), (7, 0)]:
        assert order.training_sequences(first, count).tolist() == whole[first : first + count].tolist()


@pytest.mark.parametrize(
    ("sequences", "share", "count"),
    [(2, 0.01, 1), (2, 0.99, 1), (30, 0.1, 3), (100, 0.07, 7), (1000, 0.02, 20), (1000, 0.0, 0), (57, 0.5, 29)],
)
def test_validation_and_training_sequences_are_disjoint_and_cover_everything(
    sequences: int, share: float, count: int
) -> None:
    order = ShuffledOrder(sequences, seed=9, validation=share)
    held, trained = order.validation_sequences(), order.training_sequences(0, order.training_count)
    assert sorted([*held.tolist(), *trained.tolist()]) == list(range(sequences))
    assert len(held) == order.validation_count == count


def test_another_seed_is_another_order_and_another_split() -> None:
    first, second = ShuffledOrder(1000, seed=1, validation=0.1), ShuffledOrder(1000, seed=2, validation=0.1)
    assert len(set(first.validation_sequences().tolist()) & set(second.validation_sequences().tolist())) < 30
    assert (first.training_sequences(0, 900) == second.training_sequences(0, 900)).mean() < 0.02


def test_validation_sequences_of_a_separate_set_take_nothing_from_training() -> None:
    order = ShuffledOrder(10, seed=1, separate=4)
    assert order.validation_sequences().tolist() == [0, 1, 2, 3]
    assert sorted(order.training_sequences(0, 10).tolist()) == list(range(10))


def test_impossible_splits_say_what_to_do() -> None:
    with pytest.raises(UserMistake, match=r"single sequence.*data\.validation: 0"):
        ShuffledOrder(1, seed=0, validation=0.02)
    with pytest.raises(UserMistake, match="not a fraction"):
        ShuffledOrder(10, seed=0, validation=1.5)
    with pytest.raises(UserMistake, match="no sequences"):
        ShuffledOrder(0, seed=0)
