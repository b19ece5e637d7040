"""The multiprocessors of GPUs: how many a device has, and what each of them does per second."""

from shoal.catalogue.gpus import Gpu

# Streaming multiprocessors, from NVIDIA's datasheets and architecture papers.
MULTIPROCESSORS: dict[str, int] = {
    "t4": 40,
    "rtx2080ti": 68,
    "titan-rtx": 72,
    "rtx8000": 72,
    "v100-16gb": 80,
    "v100-32gb": 80,
    "a100-40gb": 108,
    "a100-80gb": 108,
    "a800-80gb": 108,
    "a30": 56,
    "rtx3060": 28,
    "rtx3060ti": 38,
    "rtx3070": 46,
    "rtx3080": 68,
    "rtx3080ti": 80,
    "rtx3090": 82,
    "a4000": 48,
    "a5000": 64,
    "a6000": 84,
    "a10": 72,
    "a10g": 80,
    "a40": 84,
    "l4": 58,
    "l20": 92,
    "l40": 142,
    "l40s": 142,
    "rtx4060": 24,
    "rtx4060ti-16gb": 34,
    "rtx4070": 46,
    "rtx4070-super": 56,
    "rtx4070ti-super": 66,
    "rtx4080": 76,
    "rtx4090d": 114,
    "rtx4090": 128,
    "rtx6000-ada": 142,
    "h100-80gb": 132,
    "h800-80gb": 132,
    "h100-96gb": 132,
    "h100-pcie": 114,
    "h100-nvl": 132,
    "h200-nvl": 132,
    "h200": 132,
    "h20": 78,
    "gh200": 132,
    "gh200-120gb": 132,
    "b200": 148,
    "gb200": 148,
    "b300": 148,
    "rtx5060ti-16gb": 36,
    "rtx5070": 48,
    "rtx5070ti": 70,
    "rtx5080": 84,
    "rtx5090": 170,
    "rtx-pro-6000": 188,
    # Compute units, of one die of an MI250.
    "mi210": 104,
    "mi250": 104,
    "mi300x": 304,
    "mi325x": 304,
    "mi350x": 256,
    "mi355x": 256,
}


def relative_rate(gpu: Gpu) -> float:
    """The peak of a multiprocessor relative to an H200's. What takes a multiprocessor as long whatever its peak, such
    as the prologue and epilogue of a tile, weighs as much more."""
    units = multiprocessors(gpu)
    if units is None:
        return 1.0
    return (gpu.bf16 or gpu.fp16) / units / (989e12 / MULTIPROCESSORS["h200"])


def multiprocessors(gpu: Gpu) -> int | None:
    """How many multiprocessors a device has; None: not known, or it has none."""
    return gpu.measured.multiprocessors or MULTIPROCESSORS.get(gpu.name)


def cycles(gpu: Gpu) -> float:
    """Clock cycles per second of all multiprocessors together, at the clock that a device's fp32 peak assumes."""
    return gpu.fp32 / (2 * fp32_lanes(gpu.compute_capability))


def fp32_lanes(capability: tuple[int, int] | None) -> int:
    """The fp32 operations that a multiprocessor begins per clock."""
    return 64 if capability in ((7, 0), (7, 5), (8, 0)) else 128
