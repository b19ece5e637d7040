"""The shares of a device's datasheet peaks that training reaches: one set per GPU family, never fitted to one result.

The A100's come from training results, two thirds of llm-foundry's in `benchmarks/data`; the H200's from runs on one
(benchmarks/gpu/sweep_h200). The others come from published speeds of large matmuls and of flash attention on the device
itself: `MATMULS` and `ATTENTION`, whose sources are in docs/plan-speed.md.
"""

from dataclasses import dataclass, replace

from shoal.catalogue.gpus import GPUS, Gpu
from shoal.catalogue.multiprocessors import relative_rate


@dataclass(frozen=True)
class Efficiency:
    """Shares of the datasheet peaks."""

    matmuls: float  # of peak FLOP/s, large matmuls
    attention: float  # of peak FLOP/s, causal flash attention of long sequences with head dimension 128
    bandwidth: float  # of memory bandwidth, elementwise kernels
    fp8: float  # of peak fp8 FLOP/s, matmuls including casts
    half_keys: int = 0  # with this many keys per query, attention reaches half of its share; 0: not known
    fp32: float | None = None  # of peak fp32 FLOP/s, large matmuls; None: a little more than `matmuls`
    inner_half: float = 256.0  # a matmul with this inner dimension reaches half the throughput of a long one
    wide_inner_half: float = 256.0  # the same in fp32


# The share of training over the speed of large matmuls alone: 0.89 on an A100 and 0.98 on an H200, the two families of
# which both are known.
IN_TRAINING = 0.93
# Inner dimension of the matmuls that `shoal bench hardware` times on a GPU.
MEASURED_INNER = 9216
# Data center and workstation devices with GDDR memory that corrects errors by itself, which takes some of its speed.
CORRECTING = frozenset({"t4", "rtx8000", "a10", "a10g", "a40", "l4", "l20", "l40", "l40s"})
# Share of the memory bandwidth that PyTorch's kernels reach on contiguous tensors of one dtype, or if they cast fp32 to
# 16 bits: 4.0 to 4.4 TB/s on an H200 (benchmarks/gpu/adapters_h200/kernels.json). An A800's multiplication of two
# tensors reaches 0.89 (mli/transformers-benchmarks, issue 4). And of devices that correct errors: an L4's copies reach
# 0.78, where a 4090's, without it, reach 0.91 (chsasank/device-benchmarks).
CONTIGUOUS, CORRECTED = 0.87, 0.78
# Share of the bandwidth that fused kernels reach: as on an H200; and on GeForce and workstation parts since the RTX 30,
# whose memory is slow for their multiprocessors: a norm on an RTX 5090 from memory, 0.70 to 0.80 (NVIDIA/TileGym, issue
# 82), where copies and sums reach 0.85 to 0.92 on seven of these [6].
BANDWIDTH, GDDR_BANDWIDTH, GDDR = 0.64, 0.76, ((8, 6), (8, 9), (12, 0))
# Sustained TFLOP/s of large bf16 matmuls (fp16 before Ampere), and of fp32 ones: the mean of 8,192 and 10,240 rows and
# columns where both are published, else 0.96 of the best size, as on the devices that list all sizes. 72 W are too
# little for the peak of an L4, whose larger sizes reach 0.82 of the best.
MATMULS: dict[str, tuple[float, float | None]] = {
    # Its chip with more power reaches 0.86 of the same peak [2]; 70 W lower its clock from 1,590 to about 900 MHz
    # (mlcommons/inference_results_v0.5, issue 20).
    "t4": (31.7, 4.2),
    "v100-16gb": (93.4, 14.4),
    "v100-32gb": (93.4, 14.4),
    "rtx2080ti": (56.2, 12.5),
    # Not published: at the V100's share of the peak, with fp32 as on an RTX 2080 Ti.
    "titan-rtx": (97.5, 15.1),
    "rtx8000": (97.5, 15.1),
    # 54 in fp16 and 56 in bf16 [6]: 150 W are too little for the peak.
    "a10": (55.0, 14.7),
    "a10g": (68.0, 22.8),
    "a40": (117.0, 22.2),
    "l4": (58.2, 10.9),
    "l40s": (258.0, 45.0),
    "l20": (109.5, 35.8),
    # Not published: as much per watt as an L20, which has the same chip and, with 275 W, 92 of its multiprocessors.
    "l40": (119.5, 39.1),
    # fp32 as on an RTX 3090.
    "rtx3060": (27.0, 8.6),
    "rtx3060ti": (35.0, 13.3),
    "rtx3070": (39.8, 13.1),
    "rtx3080": (62.1, 20.2),
    "rtx3080ti": (74.3, 23.7),
    "rtx3090": (75.0, 24.0),
    "rtx4060": (30.0, 8.0),
    "rtx4060ti-16gb": (40.9, 11.0),
    # Not published: at the shares of the 4070 SUPER and, of the 4080, of the 4070 Ti SUPER.
    "rtx4070": (60.2, 19.3),
    "rtx4070-super": (73.3, 23.5),
    "rtx4070ti-super": (89.0, 30.0),
    "rtx4080": (98.4, 33.1),
    "rtx4090d": (145.0, 48.0),
    "rtx4090": (159.4, 52.4),
    "rtx5060ti-16gb": (46.3, 16.7),
    "rtx5070": (64.5, 23.1),
    "rtx5070ti": (95.1, 31.8),
    "rtx5080": (98.8, 32.3),
    # The median of nine machines.
    "rtx5090": (232.5, 65.3),
    "a4000": (60.3, 11.4),
    "a6000": (118.0, 23.0),
    "h100-pcie": (482.3, 36.4),
    # Its fp32 matmuls fall from 50 to 35 as it warms up; the others at the L40S's ratio, which has the same chip.
    "rtx6000-ada": (200.0, 35.0),
    "rtx-pro-6000": (402.0, 76.9),
    "h20": (136.6, 30.7),
    "gh200": (795.0, None),
    "b200": (1640.0, 63.6),
    "b300": (1698.0, None),
    "gb200": (1749.0, None),
    "mi210": (127.5, 33.4),
    # On an MI210, which has one of its two dies and about half of its power.
    "mi250": (127.5, 33.4),
    "mi355x": (1502.0, None),
}
# TFLOP/s of typical bf16 matmuls, of which training reaches all. On an MI325X 616 over ten shapes of DeepSeek V3, 650
# without what their inner dimensions cost, where the best shape reaches 831 [19]. An MI300X as much less as its best,
# 708 of 843 [20]: 546, as much as Llama's shapes were measured to reach with ROCm 6.2 [13]. The same of fp8 matmuls
# would be 1,011, and in training they reach 1,040 [21]. An MI350X in the shapes of Llama 70B 1,094 by torch.matmul and
# 1,235 by F.linear [23]. (An MI355X reaches 1,404 in those of DeepSeek V3 [24], and 1,397 by the rule of the others.)
TYPICAL: dict[str, float] = {"mi300x": 546.0, "mi325x": 650.0, "mi350x": 1165.0}
# fp8 matmuls in training, as shares of the peak: 0.93 × 0.96 of the best size [1]. Elsewhere 0.89 of what 16-bit ones
# reach, as on an H100, but at most as much as on an H200, unless multiprocessors are as slow as the H20's: what limits
# those, power or software, limits them too.
FP8: dict[str, float] = {"h20": 0.76, "gh200": 0.69, "b200": 0.68, "b300": 0.67, "gb200": 0.65}
# On an MI300X 1,023 TFLOP/s in LoRA of Llama 2 70B, 1,040 without what the inner dimensions cost [21]; an MI325X as
# much more as its best, 1,519 of 1,273 [20]; an MI355X by the rule of the others, 3,273 at best [22], and an MI350X at
# its ratio to bf16.
FP8 |= {"mi300x": 0.398, "mi325x": 0.475, "mi350x": 0.528, "mi355x": 0.58}
FP8_RATIO, FP8_MOST = 0.89, 0.62
# Ada's and Blackwell's workstation parts reach 0.99 of the share of 16-bit ones: a 4090 and an RTX PRO 6000 [9].
WORKSTATION_FP8 = 0.99
# TFLOP/s of flash attention, forward and backward pass together, of long causal sequences with head dimension 128, and
# the number of keys per query at which it reaches half of that.
ATTENTION: dict[str, tuple[float, int]] = {
    "rtx4090": (132.0, 200),  # 110 at 1,024 keys per query, 135 at 2,048 without a causal mask
    # At the H200's ratio to matmuls.
    "h100-pcie": (330.0, 200),
    "gh200": (545.0, 200),
    # Flash attention 4.
    "b200": (1150.0, 470),
    "b300": (1190.0, 470),
    "gb200": (1225.0, 470),
    # AMD's own kernels, of 2025: causal, 1,024 to 10,240 tokens, the backward pass with fp32 sums. Alone they reach 515
    # on an MI300X and 970 on an MI355X [10]; in training of Llama 2 70B on an MI300X 391 with 8,192 tokens, 0.84 of it
    # [21]. An MI325X at the MI300X's ratio to matmuls.
    "mi300x": (432.0, 430),
    "mi325x": (514.0, 430),
    "mi355x": (814.0, 450),
    # At the MI355X's ratio to matmuls.
    "mi350x": (679.0, 450),
}
# Elsewhere, relative to matmuls: flash attention 2 as on a 4090 (an A5000 and a 3090 confirm it), the memory-efficient
# kernel before Ampere, and on an MI250 the ratio of flash attention 2 on an H100.
FLASH, EFFICIENT, AMD = 0.83, 0.32, 0.56

# With libraries of 2023: llm-foundry's A100 results. With today's by the rule of the others: large matmuls reach 264.5
# to 271.2 TFLOP/s at best in three tables [1, 2], of which training reaches 0.93 × 0.96.
_OLD_AMPERE = Efficiency(
    matmuls=0.735,
    attention=0.64,
    bandwidth=0.60,
    fp8=0.62,
    # fp32 matmuls reach 17.6 to 19.2 TFLOP/s at best on three machines [2]; of their inner dimension as elsewhere.
    fp32=IN_TRAINING * 0.96 * 18.3e12 / GPUS["a100-80gb"].fp32,
    wide_inner_half=256.0 * relative_rate(GPUS["a100-80gb"]) * GPUS["a100-80gb"].fp32 / GPUS["a100-80gb"].fp16,
)
_AMPERE = replace(_OLD_AMPERE, matmuls=0.765)
_CPU = replace(_OLD_AMPERE, fp32=_OLD_AMPERE.matmuls, inner_half=0.0, wide_inner_half=0.0)
# From this year on PyTorch's wheels have the libraries that those matmuls ran with.
AMPERE_SINCE = 2025
# Matmuls in fp32, which do not use tensor cores, reach more of their lower peak.
FP32_MATMULS = 1.1
# From 35 of the runs in benchmarks/gpu/sweep_h200; 20 others were measured afterwards.
_HOPPER = Efficiency(matmuls=0.75, attention=0.52, bandwidth=0.64, fp8=0.62, half_keys=200)
_LIMITED_HOPPER = Efficiency(matmuls=0.54, attention=0.48, bandwidth=0.60, fp8=0.62)
# Hopper with older libraries, by their year. 2023, before cuBLAS and attention kernels had Hopper's instructions:
# llm-foundry's H100 results. 2024: halfway to today's; NVIDIA's own results became 27% faster from mid-2023 to mid-2024
# (MLPerf Training 4.0, 512 H100).
_OLD_HOPPER: dict[int, Efficiency] = {
    2023: Efficiency(matmuls=0.60, attention=0.335, bandwidth=0.60, fp8=0.62),
    2024: replace(_HOPPER, matmuls=(0.60 + 0.75) / 2),
}
# The same of Blackwell's data center parts, as a share of today's: in its first full year as Hopper in its second.
_OLD_BLACKWELL: dict[int, float] = {2025: 0.9}
# Flash attention 2 by Composable Kernel, before those kernels: 223 to 232 TFLOP/s on an MI300X with ROCm 6.3, of May
# 2025 [11]. AMD's Transformer Engine has had them since December 2024 (ROCm/TransformerEngine, pull request 98),
# PyTorch's SDPA since August 2025 for the backward pass alone and since 2026 for both (ROCm/aotriton, pull requests 120
# and 158).
CDNA3 = frozenset({"mi300x", "mi325x"})
_COMPOSABLE_KERNEL, _ASSEMBLY_SINCE, _TRANSFORMER_ENGINE_SINCE = 230e12, 2026, 2025
# Before ROCm 6.2, which is that of PyTorch 2.5, large matmuls reached 450 TFLOP/s where they reach 668 with PyTorch's
# TunableOp [1].
_OLD_ROCM_MATMULS: dict[int, float] = {2023: 450 / 668}
# In 2024 fp8 matmuls were no faster than 16-bit ones: 207 TFLOP/s by Transformer Engine [13], 110 by PyTorch [14].
_ROCM_FP8_SINCE = 2025


def _published(name: str) -> Efficiency:
    """From the speeds of matmuls and attention that were published for this device."""
    gpu, (matmuls, fp32) = GPUS[name], MATMULS.get(name) or (TYPICAL[name] / IN_TRAINING, None)
    peak, capability = (gpu.bf16 or gpu.fp16) / 1e12, gpu.compute_capability
    ratio = AMD if capability is None else FLASH if capability >= (8, 0) else EFFICIENT
    attention, half_keys = ATTENTION.get(name, (ratio * matmuls, 200))
    fp8 = min(FP8_MOST, FP8_RATIO * IN_TRAINING * matmuls / peak)
    if capability is not None and capability in ((8, 9), (12, 0)):
        fp8 = WORKSTATION_FP8 * IN_TRAINING * matmuls / peak
    return Efficiency(
        matmuls=IN_TRAINING * matmuls / peak,
        attention=attention / peak,
        bandwidth=GDDR_BANDWIDTH if capability in GDDR and name not in CORRECTING else BANDWIDTH,
        fp8=FP8.get(name, fp8),
        half_keys=half_keys,
        fp32=IN_TRAINING * fp32 * 1e12 / gpu.fp32 if fp32 else None,
        inner_half=256.0 * relative_rate(gpu),
        wide_inner_half=256.0 * relative_rate(gpu) * gpu.fp32 / (1e12 * peak),
    )


FAMILIES: dict[str, Efficiency] = {
    "a100-40gb": _AMPERE,
    "a100-80gb": _AMPERE,
    # The same chip as the H200 (its large matmuls reach 0.80 of the peak on both), with slower memory. Of fp8 matmuls,
    # 0.98 × 0.96 of the best size [1], 1,403 TFLOP/s; the H200's are of our own code, with its casts.
    "h100-80gb": replace(_HOPPER, fp8=0.667),
    # Limited to 500 W, this part cannot sustain the clocks that its peak assumes.
    "h100-96gb": _LIMITED_HOPPER,
    # CPU, GPU and memory share 660 W at CSCS (624 until March 2025) and 680 W in Jülich, and the CPU takes its share
    # first: about 500 W are left. fp64 matmuls reach 42.7 TFLOP/s on Alps [12] and 59.0 on an H200 [9], 0.72 of it, as
    # 16-bit ones do on the H100 that is limited to 500 W.
    "gh200-120gb": replace(_LIMITED_HOPPER, bandwidth=0.64, fp8=0.48, half_keys=200),
    "h200": _HOPPER,
    **{name: _published(name) for name in (*MATMULS, *TYPICAL)},
}
# A device without an entry is like the one of its architecture that has one.
_BY_CAPABILITY = {
    (7, 0): "v100-32gb",
    (7, 5): "t4",
    (8, 0): "a100-80gb",
    (8, 6): "a6000",
    (8, 9): "rtx4090",
    (9, 0): "h200",
    (10, 0): "b200",
    (10, 3): "b200",
    (12, 0): "rtx5090",
}


def copied_share(gpu: Gpu) -> float:
    """The share of the memory bandwidth that copies reach."""
    return CORRECTED if gpu.name in CORRECTING else CONTIGUOUS


def efficiency(gpu: Gpu, *, software: int = 0, transformer_engine: bool = False) -> Efficiency:
    """The efficiency of a GPU: by what was measured of it, else of published results, else that of the most similar
    family. `software`: the year of the libraries that run on it, where that matters; 0: today's. `transformer_engine`:
    its layers compute attention."""
    found, measured, peak = _of_family(gpu, software, transformer_engine), gpu.measured, gpu.bf16 or gpu.fp16

    # The shares are those of matmuls that are long in every dimension.
    longer, wide_longer = (1 + half / MEASURED_INNER for half in (found.inner_half, found.wide_inner_half))
    return replace(
        found,
        matmuls=found.matmuls if measured.matmuls is None else longer * measured.matmuls / peak,
        fp32=found.fp32 if measured.fp32 is None else wide_longer * measured.fp32 / gpu.fp32,
        attention=found.attention if measured.attention is None else measured.attention / peak,
        fp8=found.fp8 if measured.fp8 is None else IN_TRAINING * measured.fp8 / (gpu.fp8 or peak),
    )


def _of_family(gpu: Gpu, software: int, transformer_engine: bool) -> Efficiency:
    if gpu.name in FAMILIES:
        found = FAMILIES[gpu.name]
    elif gpu.compute_capability is None:
        found = _CPU if gpu.is_cpu else FAMILIES["mi300x"]
    else:
        newer = "h200" if gpu.compute_capability >= (9, 0) else "a100-80gb"
        found = FAMILIES[_BY_CAPABILITY.get(gpu.compute_capability, newer)]
    if found is _AMPERE and 0 < software < AMPERE_SINCE:
        return _OLD_AMPERE
    # The H100 with 96 GB was measured with software of 2024. The H20's multiprocessors are no faster than an A100's:
    # they do not need Hopper's instructions to be busy.
    hopper = max(software, min(_OLD_HOPPER)) if software else 0  # none is older than Hopper itself
    if hopper in _OLD_HOPPER and gpu.compute_capability == (9, 0) and gpu.name not in ("h100-96gb", "h20"):
        old = _OLD_HOPPER[hopper]
        return replace(
            old,
            matmuls=min(found.matmuls, old.matmuls),
            attention=min(found.attention, old.attention),
            fp8=min(found.fp8, old.fp8),
            fp32=found.fp32 or FP32_MATMULS * found.matmuls,  # without Hopper's instructions
            inner_half=found.inner_half,
            wide_inner_half=found.wide_inner_half,
        )
    if gpu.name in CDNA3 and software:
        peak, matmuls = gpu.bf16 or gpu.fp16, _OLD_ROCM_MATMULS.get(software, 1.0) * found.matmuls
        since = _TRANSFORMER_ENGINE_SINCE if transformer_engine else _ASSEMBLY_SINCE
        attention = _COMPOSABLE_KERNEL / peak if software < since else found.attention
        fp8 = matmuls * peak / (gpu.fp8 or peak) if software < _ROCM_FP8_SINCE else found.fp8
        return replace(found, matmuls=matmuls, attention=attention, fp8=fp8)
    if software in _OLD_BLACKWELL and gpu.compute_capability in ((10, 0), (10, 3)):
        share = _OLD_BLACKWELL[software]
        return replace(found, matmuls=share * found.matmuls, attention=share * found.attention, fp8=share * found.fp8)
    return found
