"""The driver, the GPUs and the links between them."""

from itertools import combinations

from shoal.catalogue.gpus import recognize
from shoal.launch.doctor.finding import Finding, failure, ok, warning
from shoal.launch.doctor.setting import Setting

# The lowest driver for each major version of CUDA, on Linux (NVIDIA's table of minor version compatibility).
LOWEST_DRIVER = {11: 450, 12: 525, 13: 580}
# MiB that a GPU may have in use before a run: a driver reserves some, also for a display.
IDLE_MIB = 1024
# Shares of the peak in the catalogue that a large matmul reaches on a healthy GPU, with room for limited power.
USUAL_SHARE, LOWEST_SHARE = 0.4, 0.15
TOPOLOGY = (
    "set hardware.link to what connects them (pcie4, pcie5; pcie-host without peer access), so that shoal plan "
    "forecasts this machine"
)


def check_driver(setting: Setting) -> Finding:
    report = setting.driver
    if report.error is not None:
        return failure(
            report.error,
            "restart the node if the driver was updated (its library and module then differ); else install the driver",
        )
    if not report.gpus:
        return ok("no GPU of NVIDIA; training uses the CPU, or what torch finds")
    driver, cuda = report.gpus[0].driver, setting.torch.cuda
    needed = LOWEST_DRIVER.get(int(cuda.split(".")[0])) if cuda and cuda[0].isdigit() else None
    if needed is not None and driver.split(".")[0].isdigit() and int(driver.split(".")[0]) < needed:
        return failure(
            f"driver {driver}, but torch was built for CUDA {cuda}, which needs {needed} or newer",
            f"update the driver to {needed} or newer, or install a build of torch for an older CUDA",
        )
    return ok(f"driver {driver}")


def check_gpus(setting: Setting) -> Finding:
    """Their number, and the health of each."""
    gpus = setting.driver.gpus
    wanted = setting.devices
    hardware = None if setting.config is None else setting.config.hardware
    if hardware is not None and not gpus and hardware.gpu_name is not None and not hardware.is_cpu:
        return failure(
            f"the config is for {hardware.gpu_name}, and this node has no GPU",
            "run shoal doctor on a node of the job: srun shoal doctor FILE",
        )
    if not gpus:
        return ok("none")
    kinds = ", ".join(
        f"{sum(gpu.name == name for gpu in gpus)} × {name}" for name in dict.fromkeys(gpu.name for gpu in gpus)
    )
    kinds = f"{kinds}, {gpus[0].memory_mib / 1024:.0f} GiB each"
    if wanted > len(gpus):
        return failure(
            f"{wanted} devices are asked for, and this process may use {len(gpus)}: {kinds}",
            "set hardware.devices or --devices to at most that, or ask the scheduler for more GPUs",
        )
    for gpu in gpus:
        if gpu.uncorrected_errors:
            return failure(
                f"{kinds}; GPU {gpu.index} has {gpu.uncorrected_errors} uncorrected memory errors",
                f"leave it out (CUDA_VISIBLE_DEVICES) and have it reset: nvidia-smi -r -i {gpu.index}",
            )
    for gpu in gpus:
        if gpu.slowdown is not None:
            return warning(f"{kinds}; the clocks of GPU {gpu.index} are reduced by {gpu.slowdown}", "have it cooled")
        if gpu.used_mib > IDLE_MIB:
            return warning(
                f"{kinds}; {gpu.used_mib / 1024:.1f} GiB of GPU {gpu.index} are in use by others",
                "nvidia-smi lists the processes; end yours, or leave the GPU out with CUDA_VISIBLE_DEVICES",
            )
        if gpu.lanes is not None and gpu.most_lanes is not None and gpu.lanes < gpu.most_lanes:
            return warning(
                f"{kinds}; GPU {gpu.index} uses {gpu.lanes} of {gpu.most_lanes} PCIe lanes",
                "have the card reseated; until then transfers to it are slower",
            )
    if len({gpu.name for gpu in gpus}) > 1:
        return warning(f"{kinds}: not all the same", "choose equal ones with CUDA_VISIBLE_DEVICES: the slowest decides")
    return ok(kinds)


def check_topology(setting: Setting) -> Finding:
    """The links between the GPUs are those that the forecast assumes."""
    gpus, links = setting.driver.gpus, setting.driver.links
    if len(gpus) < 2:
        return ok("no links: less than two GPUs")
    if not links:
        return warning("nvidia-smi topo -m does not tell the links between the GPUs", "compare with the all-reduce")
    pairs = {pair: links[pair] for pair in combinations(sorted(gpu.index for gpu in gpus), 2) if pair in links}
    kinds = " and ".join(f"{kind} ({sum(one == kind for one in pairs.values())} pairs)" for kind in set(pairs.values()))
    known = recognize(gpus[0].name)
    given = "auto" if setting.config is None else setting.config.hardware.link
    slow = [pair for pair, kind in pairs.items() if not kind.startswith("NV")]
    if known is not None and known.link.startswith("nvlink") and given == "auto" and slow:
        one, other = slow[0]
        return warning(
            f"{kinds}; the plan assumes {known.link} for {known.name}, but GPU {one} and {other} have {pairs[slow[0]]}",
            TOPOLOGY,
        )
    return ok(kinds)


def check_peers(setting: Setting) -> Finding:
    """GPUs can access each other's memory."""
    peers = setting.torch.peers
    if len(peers) < 2:
        return ok("less than two GPUs")
    blocked = [(one, other) for one, other in combinations(range(len(peers)), 2) if not peers[one][other]]
    if not blocked:
        return ok(f"between all {len(peers)} GPUs")
    one, other = blocked[0]
    found = f"{len(blocked)} pairs of GPUs cannot access each other's memory, such as {one} and {other}"
    link = (setting.driver.links or {}).get(blocked[0], "")
    if link.startswith("NV"):
        return failure(f"{found}, which NVLink connects", "check nvidia-smi nvlink -s and the fabric manager")
    return warning(
        found, "collectives go through host memory; on servers, disable ACS in the BIOS, and IOMMU in virtual machines"
    )


def check_matmul(setting: Setting) -> Finding:
    """Every GPU computes as fast as its kind does."""
    found = setting.torch
    measured = [(index, speed) for index, speed in enumerate(found.tflops) if speed is not None]
    if not measured:
        return ok("not measured: no GPU" if not found.names else "not measured: the GPUs are in use")
    index, slowest = min(measured, key=lambda one: one[1])
    fastest = max(speed for _, speed in measured)
    shown = f"{slowest:.0f} TFLOP/s" if slowest == fastest else f"{slowest:.0f} (GPU {index}) to {fastest:.0f} TFLOP/s"
    gpu = recognize(found.names[index])
    peak = None if gpu is None else (gpu.bf16 or gpu.fp16) / 1e12
    cure = "look at nvidia-smi -q -d PERFORMANCE,POWER for its clocks and limits, and for other processes on it"
    if peak is not None and slowest < LOWEST_SHARE * peak:
        return failure(f"{shown}, {slowest / peak:.0%} of the peak {peak:.0f}", cure)
    if slowest < 0.8 * fastest or (peak is not None and slowest < USUAL_SHARE * peak):
        return warning(shown + ("" if peak is None else f", {slowest / peak:.0%} of the peak {peak:.0f}"), cure)
    return ok(shown + ("" if peak is None else f", {slowest / peak:.0%} of the peak {peak:.0f}"))
