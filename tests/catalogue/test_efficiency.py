"""Shares of promised speeds: for every device, and never more than was promised."""

import pytest

from shoal.catalogue.efficiency import FAMILIES, efficiency
from shoal.catalogue.gpus import GPUS


@pytest.mark.parametrize("name", GPUS)
def test_every_device_has_shares(name):
    shares = efficiency(GPUS[name])
    assert 0 < shares.attention <= shares.matmuls < 1
    assert 0 < shares.bandwidth < 1


def test_devices_with_results_of_their_own_are_in_the_catalogue():
    assert FAMILIES.keys() <= GPUS.keys()
