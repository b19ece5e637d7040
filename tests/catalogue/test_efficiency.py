"""Efficiency: every device has one, and no share is above the datasheet peak but for the clocks of GeForce parts."""

import pytest

from shoal.catalogue.efficiency import FAMILIES, efficiency
from shoal.catalogue.gpus import GPUS


@pytest.mark.parametrize("name", GPUS)
def test_every_device_has_an_efficiency(name):
    shares = efficiency(GPUS[name])
    # GeForce parts run at higher clocks than the datasheet's, while they are cool.
    assert 0 < shares.attention <= shares.matmuls < (1.04 if name.startswith("rtx") else 1)
    assert 0 < shares.bandwidth < 1


def test_amd_kernels_become_faster_by_the_year():
    mi300x, peak = GPUS["mi300x"], 1307
    torch = {year: efficiency(GPUS["mi300x"], software=year) for year in (2023, 2024, 2025, 2026)}
    assert [round(torch[year].attention * peak) for year in torch] == [230, 230, 230, 432]
    # Transformer Engine has AMD's own kernels a year before PyTorch.
    engine = [efficiency(mi300x, software=year, transformer_engine=True).attention for year in (2024, 2025)]
    assert [round(share * peak) for share in engine] == [230, 432]
    # Matmuls too were slower before ROCm 6.2, and fp8 no faster than bf16 before 2025.
    matmuls = [torch[year].matmuls / torch[2026].matmuls for year in torch]
    assert matmuls == pytest.approx([450 / 668, 1, 1, 1])
    assert [torch[year].fp8 * 2615 / (torch[year].matmuls * peak) for year in (2023, 2024)] == pytest.approx([1, 1])
    assert torch[2025].fp8 == torch[2026].fp8
    assert efficiency(mi300x) == torch[2026]


def test_typical_matmuls_are_what_training_reaches_on_amd():
    # AMD's own ten shapes reach 616 TFLOP/s on an MI325X, and 650 without what their inner dimensions cost.
    shares = {name: efficiency(GPUS[name]) for name in ("mi300x", "mi325x", "mi355x")}
    assert [round(shares[name].matmuls * 1307) for name in ("mi300x", "mi325x")] == [546, 650]
    # fp8 by what training, or the best shape, reaches; not by bf16.
    assert [shares[name].fp8 for name in shares] == [0.398, 0.475, 0.58]
    # A compute unit has less of the peak than a multiprocessor of an H200, or more, and so has what a tile costs.
    assert [round(shares[name].inner_half) for name in shares] == [147, 147, 336]


def test_four_superchips_in_a_node_are_limited_by_their_power():
    one, four = efficiency(GPUS["gh200"]), efficiency(GPUS["gh200-120gb"])
    assert four.matmuls / one.matmuls == pytest.approx(0.72, abs=0.01)
    assert (four.attention, four.bandwidth) == (0.48, one.bandwidth)


def test_devices_with_measured_results_are_in_the_catalogue():
    assert FAMILIES.keys() <= GPUS.keys()
