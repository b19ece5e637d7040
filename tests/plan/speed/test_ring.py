"""The ring formula, compared with hand-computed values."""

import pytest

from shoal.plan.speed.ring import OPERATIONS, ring_factor, ring_seconds


@pytest.mark.parametrize(
    ("ranks", "all_reduce", "others"), [(1, 0.0, 0.0), (2, 1.0, 0.5), (4, 1.5, 0.75), (8, 1.75, 0.875)]
)
def test_the_share_of_a_tensor_that_every_link_carries(ranks: int, all_reduce: float, others: float) -> None:
    assert [ring_factor(operation, ranks) for operation in OPERATIONS] == [all_reduce, others, others]


def test_one_gigabyte_over_eight_gpus_with_nvlink4() -> None:
    assert ring_seconds("all-reduce", 8, 1e9, bytes_per_second=450e9) == pytest.approx(3.8889e-3, rel=1e-4)
    assert ring_seconds("all-gather", 8, 1e9, bytes_per_second=450e9) == pytest.approx(1.9444e-3, rel=1e-4)
    assert ring_seconds("reduce-scatter", 8, 0, bytes_per_second=450e9, latency=5e-6) == 5e-6
