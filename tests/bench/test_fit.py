"""The fit recovers latency and bandwidth from times computed from them."""

import random

import pytest

from shoal.bench.fit import fit_link

SIZES = [4096 * 4**step for step in range(9)]


def test_a_fit_recovers_latency_and_bandwidth() -> None:
    fit = fit_link([(size, 20e-6 + size / 50e9) for size in SIZES])
    assert fit is not None
    assert fit.latency == pytest.approx(20e-6, rel=1e-6)
    assert fit.bytes_per_second == pytest.approx(50e9, rel=1e-6)
    assert fit.error == pytest.approx(0, abs=1e-6)
    assert fit.seconds(50e9) == pytest.approx(1 + 20e-6)


def test_noise_of_a_few_percent_changes_a_fit_by_a_few_percent() -> None:
    # The noise of the largest message is a thousand latencies, and must not determine the fitted latency.
    source = random.Random(3)
    fit = fit_link([(size, (20e-6 + size / 1e9) * source.uniform(0.95, 1.05)) for size in SIZES])
    assert fit is not None
    assert fit.latency == pytest.approx(20e-6, rel=0.06)
    assert fit.bytes_per_second == pytest.approx(1e9, rel=0.06)
    assert 0 < fit.error < 0.05


def test_a_latency_is_never_negative() -> None:
    fit = fit_link([(1000, 0.5e-6), (2000, 2e-6), (4000, 4e-6)])
    assert fit is not None
    assert fit.latency == 0
    assert fit.bytes_per_second > 0


@pytest.mark.parametrize("points", [[], [(4096, 1e-4)], [(4096, 1e-4), (4096, 2e-4)], [(4096, 2e-4), (16384, 1e-4)]])
def test_points_that_determine_no_line_have_no_fit(points: list[tuple[float, float]]) -> None:
    assert fit_link(points) is None
