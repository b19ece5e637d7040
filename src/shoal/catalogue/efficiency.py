"""The shares of a device's datasheet peaks that training reaches: one set per GPU family, never fitted to one result.

Fitted on two thirds of the published results in `benchmarks/data` and tested on the other third; see docs/plan.md.
"""

from dataclasses import dataclass

from shoal.catalogue.gpus import Gpu


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet peaks."""

    matmuls: float  # of peak FLOP/s, large matmuls
    attention: float  # of peak FLOP/s, causal flash attention of long sequences with head dimension 128
    bandwidth: float  # of memory bandwidth, elementwise kernels
    fp8: float  # of peak fp8 FLOP/s, matmuls including casts
    half_keys: int = 0  # with this many keys per query, attention reaches half of its share; 0: not known


_AMPERE = Efficiency(matmuls=0.735, attention=0.64, bandwidth=0.60, fp8=0.62)
_HOPPER = Efficiency(matmuls=0.60, attention=0.335, bandwidth=0.60, fp8=0.62)

FAMILIES: dict[str, Efficiency] = {
    "a100-40gb": _AMPERE,
    "a100-80gb": _AMPERE,
    "h100-80gb": _HOPPER,
    "h100-pcie": _HOPPER,
    # Limited to 500 W, this part cannot sustain the clocks that its peak assumes.
    "h100-96gb": Efficiency(matmuls=0.54, attention=0.29, bandwidth=0.60, fp8=0.62),
    # From 35 of the runs in benchmarks/gpu/sweep_h200; 20 others were measured afterwards.
    "h200": Efficiency(matmuls=0.75, attention=0.52, bandwidth=0.64, fp8=0.62, half_keys=200),
}


def efficiency(gpu: Gpu) -> Efficiency:
    """The efficiency of a GPU; without published results that of the most similar family."""
    if gpu.name in FAMILIES:
        return FAMILIES[gpu.name]
    capability = gpu.compute_capability
    return _HOPPER if capability is not None and capability >= (9, 0) else _AMPERE
