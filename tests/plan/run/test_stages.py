"""Pipeline stages are balanced by their time."""

import pytest

from shoal.plan.run.stages import bubble_share, divide_blocks


@pytest.mark.parametrize(
    ("blocks", "stages", "head", "sizes"),
    [
        (8, 4, 0.0, [2, 2, 2, 2]),
        (8, 2, 2.0, [5, 3]),  # the head takes as long as two blocks
        (8, 4, 3.0, [2, 2, 3, 1]),
        (9, 4, 0.0, [2, 2, 2, 3]),  # three blocks on the last stage, not on the first, which has the embedding
        (4, 4, 9.0, [1, 1, 1, 1]),
        (3, 1, 1.0, [3]),
    ],
)
def test_the_slowest_stage_is_as_fast_as_possible(blocks: int, stages: int, head: float, sizes: list[int]) -> None:
    divided = divide_blocks(blocks, stages, head)
    assert [len(one) for one in divided] == sizes
    assert [block for one in divided for block in one] == list(range(blocks))


def test_a_large_model_is_split_quickly() -> None:
    divided = divide_blocks(126, 16, 1.3)
    assert max(len(one) for one in divided[:-1]) <= 8


def test_more_micro_batches_make_the_bubble_smaller() -> None:
    assert bubble_share(4, 1) == pytest.approx(0.75)
    assert bubble_share(4, 12) == pytest.approx(0.2)
    assert bubble_share(4, 12, chunks=2) == pytest.approx(1.5 / 13.5)
