"""Datasheet figures of GPUs and links, as input of the forecast.

Speeds are the vendors' dense peaks, not the sparse ones; half-precision matmuls with fp32 accumulation, as in training.
Memory is what the driver reports (`torch.cuda.get_device_properties().total_memory`), a little less than advertised.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shoal.mistakes import UserMistake, suggestion


@dataclass(frozen=True)
class Link:
    """An interconnect of a GPU."""

    name: str
    bytes_per_second: float  # per direction and GPU, nominal
    latency: float  # seconds for one small message, an order of magnitude
    measured: bool = False  # the bandwidth is what collectives reach, not nominal


@dataclass(frozen=True)
class Measured:
    """What `shoal bench hardware` measured on one device; None: not measured, as on such devices."""

    matmuls: float | None = None  # FLOP/s of large matmuls in 16 bits
    fp32: float | None = None  # and in other precisions
    fp8: float | None = None
    attention: float | None = None  # FLOP/s of causal attention in 16 bits, both passes
    multiprocessors: int | None = None


@dataclass(frozen=True)
class Gpu:
    """One device as PyTorch sees it. A speed of None: not supported by the hardware."""

    name: str
    memory_gib: float
    memory_bandwidth: float  # bytes per second
    bf16: float | None  # FLOP/s, as the next three
    fp16: float
    fp32: float  # with TF32 off
    fp8: float | None
    compute_capability: tuple[int, int] | None  # NVIDIA's; None elsewhere
    link: str  # between the GPUs of a node, by default
    measured: Measured = Measured()

    @property
    def is_cpu(self) -> bool:
        """Whether this is the CPU entry."""
        return self.name == "cpu"

    @property
    def host_link(self) -> Link:
        """Between the device and the memory of its host: sixteen lanes of the PCI Express of its generation, or
        NVLink-C2C to a Grace."""
        if self.name in ("gh200", "gh200-120gb", "gb200"):
            return LINKS["nvlink-c2c-shared" if self.name == "gb200" else "nvlink-c2c"]
        if self.name.startswith("mi"):
            return LINKS["pcie4" if self.name in ("mi210", "mi250") else "pcie5"]
        capability = self.compute_capability or (0, 0)
        return LINKS["pcie5" if capability >= (9, 0) else "pcie4" if capability >= (8, 0) else "pcie3"]


# Bandwidths: vendors' pages and the standards' line rates. Latencies: typical of public collective benchmarks.
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("nvlink2", 150e9, 5e-6),
        Link("nvlink3", 300e9, 5e-6),
        Link("nvlink4", 450e9, 5e-6),
        Link("nvlink5", 900e9, 5e-6),
        # Eight links instead of twelve and eighteen.
        Link("nvlink-a800", 200e9, 5e-6),
        Link("nvlink-h800", 200e9, 5e-6),
        # From a GPU to the memory of a Grace, which has one of them (GH200) or two (GB200).
        Link("nvlink-c2c", 450e9, 5e-6),
        Link("nvlink-c2c-shared", 225e9, 5e-6),
        # AMD's links between the GPUs of a node, all links of a GPU together.
        Link("xgmi2", 150e9, 8e-6),
        Link("xgmi3", 448e9, 8e-6),
        Link("xgmi4", 537e9, 8e-6),
        # Sixteen lanes.
        Link("pcie3", 15.75e9, 10e-6),
        Link("pcie4", 31.5e9, 10e-6),
        Link("pcie5", 63e9, 10e-6),
        # The same between cards that cannot access each other's memory, so that every byte passes that of the host:
        # what an all-gather is measured to reach (see plan/speed/communication.py).
        Link("pcie-host", 7.7e9, 10e-6),
        # One port per GPU.
        Link("infiniband-hdr", 25e9, 10e-6),
        Link("infiniband-ndr", 50e9, 10e-6),
        # A port of 100 Gbit/s for two GPUs, as in a DGX-1 and a DGX-2.
        Link("infiniband-edr", 6.25e9, 10e-6),
        # TCP through the kernel, hence the latency.
        Link("ethernet-10", 1.25e9, 50e-6),
        Link("ethernet-25", 3.125e9, 50e-6),
        Link("ethernet-100", 12.5e9, 30e-6),
        # Processes of one node over gloo: a rough guess.
        Link("loopback", 2e9, 50e-6),
    )
}

# Peaks and bandwidths: vendors' datasheets; where they give a whole server or sparse peaks, the line says so.
# Memory: totals that PyTorch prints on these parts; of the B300, what nvidia-smi prints (275,040 MiB) less 0.9 GiB; of
# GeForce parts from the RTX 4060 on but the 4090 and 5090, what nvidia-smi prints less what it is less on those two.
GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        # In the order of the fields: name, GiB, bytes per second, bf16, fp16, fp32, fp8, capability, link.
        Gpu("t4", 14.56, 320e9, None, 65e12, 8.1e12, None, (7, 5), "pcie3"),
        Gpu("v100-16gb", 15.77, 900e9, None, 125e12, 15.7e12, None, (7, 0), "nvlink2"),
        Gpu("v100-32gb", 31.73, 900e9, None, 125e12, 15.7e12, None, (7, 0), "nvlink2"),
        # GeForce parts run half-precision matmuls with fp32 accumulation at half rate, Titan and Quadro at full rate;
        # and the driver does not let them access each other's memory (NVIDIA/nccl, issue 1127; nccl-tests, issue 117).
        Gpu("rtx2080ti", 10.76, 616e9, None, 53.8e12, 13.45e12, None, (7, 5), "pcie-host"),
        Gpu("titan-rtx", 23.65, 672e9, None, 130.5e12, 16.3e12, None, (7, 5), "pcie3"),
        Gpu("rtx8000", 47.46, 672e9, None, 130.5e12, 16.3e12, None, (7, 5), "pcie3"),
        Gpu("a10", 22.06, 600e9, 125e12, 125e12, 31.2e12, None, (8, 6), "pcie4"),
        # In virtual machines, as Amazon's G5 and G6, without access to each other's memory (ray, issue 39471;
        # llm-d-infra, pull request 181), like the L4.
        Gpu("a10g", 22.06, 600e9, 70e12, 70e12, 31.5e12, None, (8, 6), "pcie-host"),
        Gpu("a30", 23.50, 933e9, 165e12, 165e12, 10.3e12, None, (8, 0), "pcie4"),
        Gpu("a40", 44.35, 696e9, 149.7e12, 149.7e12, 37.4e12, None, (8, 6), "pcie4"),
        Gpu("l4", 22.03, 300e9, 121e12, 121e12, 30.3e12, 242e12, (8, 9), "pcie-host"),
        Gpu("l20", 44.39, 864e9, 119.5e12, 119.5e12, 59.8e12, 239e12, (8, 9), "pcie4"),
        Gpu("l40", 44.39, 864e9, 181e12, 181e12, 90.5e12, 362e12, (8, 9), "pcie4"),
        Gpu("l40s", 44.39, 864e9, 362e12, 362e12, 91.6e12, 733e12, (8, 9), "pcie4"),
        # GeForce again: half-precision matmuls with fp32 accumulation at half rate, twice that of fp32.
        Gpu("rtx3060", 11.65, 360e9, 25.5e12, 25.5e12, 12.74e12, None, (8, 6), "pcie-host"),
        Gpu("rtx3060ti", 7.79, 448e9, 32.4e12, 32.4e12, 16.2e12, None, (8, 6), "pcie-host"),
        Gpu("rtx3070", 7.79, 448e9, 40.6e12, 40.6e12, 20.3e12, None, (8, 6), "pcie-host"),
        Gpu("rtx3080", 9.78, 760e9, 59.5e12, 59.5e12, 29.8e12, None, (8, 6), "pcie-host"),
        Gpu("rtx3080ti", 11.76, 912e9, 68.2e12, 68.2e12, 34.1e12, None, (8, 6), "pcie-host"),
        Gpu("rtx3090", 23.68, 936e9, 71e12, 71e12, 35.6e12, None, (8, 6), "pcie-host"),
        Gpu("rtx4060", 7.65, 272e9, 30.2e12, 30.2e12, 15.1e12, 60.5e12, (8, 9), "pcie-host"),
        Gpu("rtx4060ti-16gb", 15.65, 288e9, 44.1e12, 44.1e12, 22.1e12, 88.3e12, (8, 9), "pcie-host"),
        Gpu("rtx4070", 11.65, 504e9, 58.3e12, 58.3e12, 29.1e12, 116.6e12, (8, 9), "pcie-host"),
        Gpu("rtx4070-super", 11.65, 504e9, 71e12, 71e12, 35.5e12, 142e12, (8, 9), "pcie-host"),
        Gpu("rtx4070ti-super", 15.65, 672e9, 88.2e12, 88.2e12, 44.1e12, 176.4e12, (8, 9), "pcie-host"),
        Gpu("rtx4080", 15.65, 717e9, 97.5e12, 97.5e12, 48.7e12, 195e12, (8, 9), "pcie-host"),
        Gpu("rtx4090", 23.64, 1008e9, 165.2e12, 165.2e12, 82.6e12, 330.3e12, (8, 9), "pcie-host"),
        Gpu("rtx4090d", 23.64, 1008e9, 147.1e12, 147.1e12, 73.5e12, 294.2e12, (8, 9), "pcie-host"),
        # With eight lanes of PCI Express. Of this generation, collectives are measured to reach more than before.
        Gpu("rtx5060ti-16gb", 15.45, 448e9, 47.4e12, 47.4e12, 23.7e12, 94.8e12, (12, 0), "pcie4"),
        Gpu("rtx5070", 11.46, 672e9, 61.7e12, 61.7e12, 30.9e12, 123.5e12, (12, 0), "pcie5"),
        Gpu("rtx5070ti", 15.44, 896e9, 87.9e12, 87.9e12, 43.9e12, 175.8e12, (12, 0), "pcie5"),
        Gpu("rtx5080", 15.44, 960e9, 112.6e12, 112.6e12, 56.3e12, 225.1e12, (12, 0), "pcie5"),
        Gpu("rtx5090", 31.36, 1792e9, 209.5e12, 209.5e12, 104.8e12, 419e12, (12, 0), "pcie5"),
        Gpu("a4000", 15.73, 448e9, 76.7e12, 76.7e12, 19.2e12, None, (8, 6), "pcie4"),
        Gpu("a5000", 23.68, 768e9, 111.1e12, 111.1e12, 27.8e12, None, (8, 6), "pcie4"),
        Gpu("a6000", 47.54, 768e9, 154.8e12, 154.8e12, 38.7e12, None, (8, 6), "pcie4"),
        # Unlike GeForce parts at full rate: the tensor peak of the datasheet, 1,457 TFLOP/s, is sparse fp8.
        Gpu("rtx6000-ada", 47.50, 960e9, 364.2e12, 364.2e12, 91.1e12, 728.5e12, (8, 9), "pcie4"),
        # The Workstation Edition: 4,000 TFLOP/s of sparse fp4. The Server Edition and the Max-Q are slower.
        Gpu("rtx-pro-6000", 94.97, 1792e9, 503.8e12, 503.8e12, 125e12, 1007.6e12, (12, 0), "pcie5"),
        Gpu("a100-40gb", 39.49, 1555e9, 312e12, 312e12, 19.5e12, None, (8, 0), "nvlink3"),
        Gpu("a100-80gb", 79.25, 2039e9, 312e12, 312e12, 19.5e12, None, (8, 0), "nvlink3"),
        # A100 and H100 with less NVLink.
        Gpu("a800-80gb", 79.25, 2039e9, 312e12, 312e12, 19.5e12, None, (8, 0), "nvlink-a800"),
        Gpu("h800-80gb", 79.11, 3.35e12, 989e12, 989e12, 67e12, 1979e12, (9, 0), "nvlink-h800"),
        Gpu("h100-80gb", 79.11, 3.35e12, 989e12, 989e12, 67e12, 1979e12, (9, 0), "nvlink4"),
        Gpu("h100-pcie", 79.11, 2.0e12, 756e12, 756e12, 51e12, 1513e12, (9, 0), "pcie5"),
        # Limited to 500 W: the peak is the SXM part's, but the clocks cannot sustain it, so expect a lower share.
        Gpu("h100-96gb", 95.0, 2.4e12, 989e12, 989e12, 67e12, 1979e12, (9, 0), "nvlink4"),
        Gpu("h200", 139.80, 4.8e12, 989e12, 989e12, 67e12, 1979e12, (9, 0), "nvlink4"),
        # Cards of 400 and 600 W, with half of their sparse peaks, 1,671 and 3,341 TFLOP/s. Bridges between them
        # are bought apart: `hardware.link` is nvlink3 with those of H100, nvlink4 with those of H200.
        Gpu("h100-nvl", 93.00, 3.9e12, 835e12, 835e12, 60e12, 1671e12, (9, 0), "pcie5"),
        Gpu("h200-nvl", 139.80, 4.8e12, 835e12, 835e12, 60e12, 1671e12, (9, 0), "pcie5"),
        # A Hopper with 78 multiprocessors at a quarter of their matmul rate, and all of its memory and NVLink.
        Gpu("h20", 95.00, 4.0e12, 148e12, 148e12, 44e12, 296e12, (9, 0), "nvlink4"),
        # With 96 GB of HBM3. The second one is in nodes of four, as in Alps and JUPITER, which leave it less power.
        Gpu("gh200", 94.50, 4.0e12, 989e12, 989e12, 67e12, 1979e12, (9, 0), "nvlink4"),
        Gpu("gh200-120gb", 94.50, 4.0e12, 989e12, 989e12, 67e12, 1979e12, (9, 0), "nvlink4"),
        Gpu("b200", 178.35, 7.7e12, 2250e12, 2250e12, 75e12, 4500e12, (10, 0), "nvlink5"),
        # A 72nd of a GB200 NVL72: half of its sparse peaks, 360 PFLOP/s in bf16 and 720 in fp8.
        Gpu("gb200", 184.0, 8.0e12, 2500e12, 2500e12, 80e12, 5000e12, (10, 0), "nvlink5"),
        # An eighth of an HGX B300: half of its sparse peaks, 36 PFLOP/s in bf16 and 72 in fp8.
        Gpu("b300", 267.7, 7.7e12, 2250e12, 2250e12, 75e12, 4500e12, (10, 3), "nvlink5"),
        # Half a card: PyTorch sees each of its two dies as a device.
        Gpu("mi250", 63.98, 1.6e12, 181e12, 181e12, 45.3e12, None, None, "xgmi2"),
        # One such die on a card of its own; two to four are joined by bridges, if any.
        Gpu("mi210", 63.98, 1.6e12, 181e12, 181e12, 45.3e12, None, None, "pcie4"),
        Gpu("mi300x", 191.98, 5.3e12, 1307e12, 1307e12, 163.4e12, 2615e12, None, "xgmi3"),
        Gpu("mi325x", 255.98, 6.0e12, 1307.4e12, 1307.4e12, 163.4e12, 2614.9e12, None, "xgmi3"),
        # One chip, with 1,000 W (MI350X) and 1,400 W (MI355X).
        Gpu("mi350x", 287.98, 8.0e12, 2306.9e12, 2306.9e12, 144.2e12, 4613.7e12, None, "xgmi4"),
        Gpu("mi355x", 287.98, 8.0e12, 2516.6e12, 2516.6e12, 157.3e12, 5033e12, None, "xgmi4"),
        # For planning, not measured: about eight cores of a workstation.
        Gpu("cpu", 16.0, 50e9, 0.5e12, 0.25e12, 0.5e12, None, None, "loopback"),
    )
}

# Names that drivers print, without the vendor. Full matches only: a laptop part, a MIG slice or a Ti is a
# different device, and no match is better than a wrong one.
_PRINTED: tuple[tuple[str, str], ...] = (
    (r"t4", "t4"),
    (r"v100(-sxm2|-sxm3|-pcie)-16gb", "v100-16gb"),
    (r"v100s?(-sxm2|-sxm3|-pcie)-32gb", "v100-32gb"),
    (r"rtx 2080 ti", "rtx2080ti"),
    (r"titan rtx", "titan-rtx"),
    (r"rtx 8000", "rtx8000"),
    (r"a10", "a10"),
    (r"a10g", "a10g"),
    (r"a30", "a30"),
    (r"a40", "a40"),
    (r"l20", "l20"),
    (r"rtx (3060|3070|3080|4060|4070|4080|5070|5080)", r"rtx\1"),
    (r"rtx (3060|3080|5070) ti", r"rtx\1ti"),
    (r"rtx 4070 super", "rtx4070-super"),
    (r"rtx 4070 ti super", "rtx4070ti-super"),
    (r"rtx 4090 d", "rtx4090d"),
    (r"rtx a4000", "a4000"),
    (r"h20", "h20"),
    (r"(mi350x|mi355x)( oam)?", r"\1"),
    (r"mi210", "mi210"),
    (r"l4", "l4"),
    (r"l40", "l40"),
    (r"l40s", "l40s"),
    (r"rtx 3090", "rtx3090"),
    (r"rtx 4090", "rtx4090"),
    (r"rtx 5090", "rtx5090"),
    (r"rtx a5000", "a5000"),
    (r"rtx a6000", "a6000"),
    (r"rtx 6000 ada generation", "rtx6000-ada"),
    (r"rtx pro 6000 blackwell workstation edition", "rtx-pro-6000"),
    (r"a800-sxm4-80gb|a800 80gb pcie", "a800-80gb"),
    (r"h800", "h800-80gb"),
    (r"gh200 480gb", "gh200"),
    (r"gh200 120gb", "gh200-120gb"),
    (r"gb200", "gb200"),
    (r"b300 sxm6 ac", "b300"),
    (r"mi325x( oam)?", "mi325x"),
    (r"a100-(sxm4|pcie)-40gb", "a100-40gb"),
    (r"a100-(sxm4|pcie)-80gb|a100 80gb pcie", "a100-80gb"),
    (r"h100 80gb hbm3|h100 sxm5", "h100-80gb"),
    (r"h100 pcie|h100-pcie-80gb", "h100-pcie"),
    (r"(h100|h200) nvl", r"\1-nvl"),
    (r"h100 96gb hbm2e?|h100-96gb-500w", "h100-96gb"),
    (r"h200|h200 141gb hbm3e", "h200"),
    (r"b200", "b200"),
    (r"mi250|mi250x ?/ ?mi250", "mi250"),
    (r"mi300x( oam)?", "mi300x"),
    (r"cpu", "cpu"),
)

_PCIE_CARD = {
    "v100-16gb": "pcie3",
    "v100-32gb": "pcie3",
    "a100-40gb": "pcie4",
    "a100-80gb": "pcie4",
    "a800-80gb": "pcie4",
}


def find_gpu(name: str) -> Gpu:
    """The GPU called `name`; case, underscores and spaces do not matter."""
    try:
        return GPUS[_spelled(name)]
    except KeyError:
        raise UserMistake(f"No GPU is called '{name}'.{_meant(name, GPUS)} The names are {', '.join(GPUS)}.") from None


def find_link(name: str) -> Link:
    """The link called `name`; case, underscores and spaces do not matter."""
    try:
        return LINKS[_spelled(name)]
    except KeyError:
        raise UserMistake(
            f"No link is called '{name}'.{_meant(name, LINKS)} The names are {', '.join(LINKS)}."
        ) from None


def recognize(device_name: str) -> Gpu | None:
    """The entry for a name as `torch.cuda.get_device_name()` and nvidia-smi print it; None if it is unknown.

    A PCIe card of a model that is catalogued with NVLink is returned with its PCIe link.
    """
    printed = re.sub(r"^((nvidia|tesla|geforce|quadro|amd|instinct)\s+)*", "", device_name.strip().lower())
    for pattern, name in _PRINTED:
        if (found := re.fullmatch(pattern, printed)) is not None:
            gpu = GPUS[found.expand(name)]
            if "pcie" in printed and gpu.name in _PCIE_CARD:
                return replace(gpu, link=_PCIE_CARD[gpu.name])
            return gpu
    return None


def _meant(name: str, choices: Iterable[str]) -> str:
    # A part ('a100', '4090') suggests the names that have it, the usual one first, even if another is closer by edit
    # distance ('a10g', 'h100-pcie').
    spelled = _spelled(name)
    names = list(choices)
    partly = [choice for choice in names if choice.startswith(spelled)] or [one for one in names if spelled in one]
    return f" Did you mean {' or '.join(partly[:3])}?" if spelled and partly else suggestion(spelled, names)


def _spelled(name: str) -> str:
    return re.sub(r"[\s_]+", "-", name.strip().lower())
