"""What shares of a device's promised speeds training reaches: one set for each family of GPUs, never for a result.

Chosen on two thirds of the published results in `benchmarks/data` and held against the other third; see docs/plan.md.
"""

from dataclasses import dataclass

from shoal.catalogue.gpus import Gpu


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet's figures."""

    products: float  # of the peak, large matrix products
    attention: float  # of the peak, fused causal attention with heads of 128
    bandwidth: float  # of the memory's, kernels that only read and write
    eight_bit: float  # of the 8-bit peak, matrix products with the casts around them


_AMPERE = Efficiency(products=0.735, attention=0.64, bandwidth=0.60, eight_bit=0.62)
_HOPPER = Efficiency(products=0.60, attention=0.335, bandwidth=0.60, eight_bit=0.62)

FAMILIES: dict[str, Efficiency] = {
    "a100-40gb": _AMPERE,
    "a100-80gb": _AMPERE,
    "h100-80gb": _HOPPER,
    "h100-pcie": _HOPPER,
    # Held to 500 W, this part cannot stay at the clocks that its peak is counted at.
    "h100-96gb": Efficiency(products=0.54, attention=0.29, bandwidth=0.60, eight_bit=0.62),
    "h200": Efficiency(products=0.79, attention=0.36, bandwidth=0.60, eight_bit=0.75),
}


def efficiency(gpu: Gpu) -> Efficiency:
    """The family's figures; a device without published results takes those of the nearest that has some."""
    if gpu.name in FAMILIES:
        return FAMILIES[gpu.name]
    capability = gpu.compute_capability
    return _HOPPER if capability is not None and capability >= (9, 0) else _AMPERE
