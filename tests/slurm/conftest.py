"""One cluster for all tests here; without Slurm's packages they are skipped, and say why."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, why_not


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
