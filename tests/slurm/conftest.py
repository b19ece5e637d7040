"""One cluster for all tests here; without Slurm's packages they are skipped, and say why."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, why_not


def pytest_itemcollected(item: pytest.Item) -> None:
    """Jobs wait for Slurm, up to half a minute. All at the beginning, so that one worker runs them on one cluster."""
    item.add_marker("long")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    reason = why_not()
    if reason is not None:
        pytest.skip(f"no Slurm here: {reason}")
    made = Cluster()
    try:
        made.start()
        yield made
    finally:
        made.stop()
