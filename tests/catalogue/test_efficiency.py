"""Efficiency: every device has one, and no share is above the datasheet peak but for the clocks of GeForce parts."""

import pytest

from shoal.catalogue.efficiency import FAMILIES, efficiency
from shoal.catalogue.gpus import GPUS


@pytest.mark.parametrize("name", GPUS)
def test_every_device_has_an_efficiency(name):
    shares = efficiency(GPUS[name])
    # GeForce parts run at higher clocks than the datasheet's, while they are cool.
    assert 0 < shares.attention <= shares.matmuls < (1.02 if name.startswith("rtx") else 1)
    assert 0 < shares.bandwidth < 1


def test_devices_with_measured_results_are_in_the_catalogue():
    assert FAMILIES.keys() <= GPUS.keys()
