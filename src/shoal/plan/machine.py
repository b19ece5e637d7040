"""The hardware a run is planned for: the devices and links that the config names, or the local ones."""

import os
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.catalogue.efficiency import copied_share
from shoal.catalogue.gpus import Gpu, Link, Measured, find_gpu, find_link, recognize
from shoal.config.schema import GpuConfig, HardwareConfig, LinkConfig
from shoal.plan.terms import GIB

# Where NVIDIA's driver lists the local GPUs, readable without any library.
DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    """Devices, their number, and the links between them."""

    gpu: Gpu
    link: Link
    network: Link
    devices: int  # in each node
    nodes: int = 1
    host_gib: float | None = None  # host memory per node
    host_block_ms: float | None = None  # host time of an uncompiled Llama block; None: as is usual
    price: float | None = None  # per device and hour
    notes: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.devices * self.nodes

    @property
    def is_cpu(self) -> bool:
        return self.gpu.is_cpu

    def of(self, devices: int, nodes: int) -> "Machine":
        return replace(self, devices=devices, nodes=nodes)


def read_machine(hardware: HardwareConfig, driver: Path = DRIVER) -> Machine:
    """The machine that `hardware` describes; values left at auto are detected locally."""
    notes: list[str] = []
    present = _present(driver)
    if isinstance(hardware.gpu, GpuConfig):
        gpu = gpu_of(hardware.gpu)
    elif hardware.gpu != "auto":
        gpu = find_gpu(hardware.gpu)
    else:
        found = [known for name in present if (known := recognize(name)) is not None]
        gpu = found[0] if found else _this_cpu()
        if present and not found:
            notes.append(
                f"The local GPU, {present[0]}, is not in the catalogue, so this plan is for the CPU; shoal bench "
                "hardware measures it, or set hardware.gpu to the most similar device."
            )
        elif not present:
            notes.append("There is no local GPU, so this plan is for the CPU; set hardware.gpu to plan for a GPU.")
    is_here = hardware.gpu == "auto" or _is_of(hardware, present[0] if present else None)
    devices = hardware.devices
    if devices == "auto":
        devices = len(present) if present and is_here else 1
        if not gpu.is_cpu and not is_here:
            notes.append("Planned for one device; set hardware.devices and hardware.nodes to plan for more.")
    if gpu.is_cpu:
        gpu = _shared(gpu, devices)
    return Machine(
        gpu=gpu,
        link=_link(hardware.link, gpu.link),
        network=_link(hardware.network, usual_network(gpu)),
        devices=devices,
        nodes=hardware.nodes,
        host_gib=hardware.host_gib or (host_memory_gib() if is_here else None),
        host_block_ms=hardware.host_block_ms,
        price=hardware.price,
        notes=tuple(notes),
    )


def machine_at_hand(
    printed: str | None,
    memory_gib: float | None,
    devices: int,
    nodes: int = 1,
    *,
    hardware: HardwareConfig | None = None,
    host_gib: float | None = None,
) -> Machine:
    """The machine that a process runs on: the device's name as the driver prints it, and its actual memory.

    None for both means the CPU. If `hardware.gpu` was measured on such a device, it is that. Else a device that is not
    in the catalogue is treated as an A100 with its memory: whether a run fits does not depend on that, and which
    strategy is fastest hardly does. Links cannot be detected: they are those of `hardware`, or the usual ones of such
    devices.
    """
    is_cpu = printed is None or memory_gib is None
    given = None if hardware is None else hardware.gpu
    if hardware is not None and _is_of(hardware, printed) and isinstance(given, GpuConfig):
        gpu = gpu_of(given)
    else:
        if isinstance(given, GpuConfig) and given.name is not None:
            hardware = None  # all of it was measured elsewhere
        gpu = _this_cpu() if is_cpu else recognize(printed or "") or find_gpu("a100-80gb")
    memory_gib = host_gib if is_cpu else memory_gib
    gpu = gpu if memory_gib is None else replace(gpu, memory_gib=memory_gib)
    if is_cpu:
        gpu = _shared(gpu, devices)
    return Machine(
        gpu=gpu,
        link=_link("auto" if hardware is None else hardware.link, gpu.link),
        network=_link("auto" if hardware is None else hardware.network, usual_network(gpu)),
        devices=devices,
        nodes=nodes,
        host_gib=host_gib,
        host_block_ms=None if hardware is None else hardware.host_block_ms,
    )


def _is_of(hardware: HardwareConfig, printed: str | None) -> bool:
    """Whether `hardware.gpu` was measured on the device of that name; None: on the CPU."""
    return isinstance(hardware.gpu, GpuConfig) and hardware.gpu.name == (printed or processor_name())


def usual_network(gpu: Gpu) -> str:
    """The usual network between nodes with such devices; one port per device, with V100 for two."""
    if gpu.is_cpu:
        return "ethernet-10"
    if gpu.name.startswith("mi") and gpu.link.startswith("xgmi"):
        return "infiniband-hdr" if gpu.name == "mi250" else "infiniband-ndr"
    if not gpu.link.startswith("nvlink"):
        return "ethernet-25"
    capability = gpu.compute_capability or (0, 0)
    if capability < (8, 0):
        return "infiniband-edr"
    return "infiniband-ndr" if capability >= (9, 0) else "infiniband-hdr"


def _link(wanted: str | LinkConfig, usual: str) -> Link:
    if isinstance(wanted, LinkConfig):
        # Collectives over PCI Express reach less of it, and have other latencies. What was measured is one of the usual
        # links, of which smaller groups have as much less as ever.
        given = "pcie-given" if usual.startswith("pcie") else "as given"
        return Link(
            usual if wanted.measured else given,
            wanted.gb_per_second * 1e9,
            wanted.latency_us * 1e-6,
            wanted.measured,
        )
    return find_link(usual if wanted == "auto" else wanted)


def gpu_of(wanted: GpuConfig) -> Gpu:
    """The device that a block `hardware.gpu` describes."""
    gpu = find_gpu(wanted.like)
    if wanted.name is not None and (known := recognize(wanted.name)) is not None and known.name == gpu.name:
        gpu = known  # with the link of a PCIe card, if it is one
    if wanted.memory_gib is not None:
        gpu = replace(gpu, memory_gib=wanted.memory_gib)
    if wanted.gb_per_second is not None:
        gpu = replace(gpu, memory_bandwidth=wanted.gb_per_second * 1e9)
    if wanted.tflops is not None:
        peak = wanted.tflops * 1e12
        # The other peaks scale by the same factor.
        ratio = peak / (gpu.bf16 or gpu.fp16)
        gpu = replace(
            gpu,
            bf16=peak if gpu.bf16 else None,
            fp16=peak,
            fp32=gpu.fp32 * ratio,
            fp8=gpu.fp8 * ratio if gpu.fp8 else None,
        )
    if wanted.copy_gb_per_second is not None:
        gpu = replace(gpu, memory_bandwidth=wanted.copy_gb_per_second * 1e9 / copied_share(gpu))
    if wanted.compute_capability is not None:
        major, minor = wanted.compute_capability.split(".")
        gpu = replace(gpu, compute_capability=(int(major), int(minor)))
    if wanted.fp8_matmul_tflops is not None and gpu.fp8 is None:
        gpu = replace(gpu, fp8=2 * (gpu.bf16 or gpu.fp16))
    measured = Measured(
        matmuls=_flops(wanted.matmul_tflops),
        fp32=_flops(wanted.fp32_matmul_tflops),
        fp8=_flops(wanted.fp8_matmul_tflops),
        attention=_flops(wanted.attention_tflops),
        multiprocessors=wanted.multiprocessors,
    )
    return replace(gpu, measured=measured)


def _flops(tflops: float | None) -> float | None:
    return None if tflops is None else 1e12 * tflops


def _shared(cpu: Gpu, processes: int) -> Gpu:
    """What each of the processes of a node has of its CPU."""

    def part(speed: float | None) -> float | None:
        return None if speed is None else speed / processes

    measured = cpu.measured
    return replace(
        cpu,
        memory_gib=cpu.memory_gib / processes,
        memory_bandwidth=cpu.memory_bandwidth / processes,
        bf16=part(cpu.bf16),
        fp16=cpu.fp16 / processes,
        fp32=cpu.fp32 / processes,
        measured=replace(
            measured,
            matmuls=part(measured.matmuls),
            fp32=part(measured.fp32),
            attention=part(measured.attention),
        ),
    )


def processor_name(described: Path = Path("/proc/cpuinfo")) -> str:
    """This machine's processor, as the kernel names it, and its cores."""
    lines = described.read_text().splitlines() if described.exists() else []
    named = next((line for line in lines if line.startswith("model name")), "")
    name = named.partition(":")[2].strip() or platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"


def _present(driver: Path) -> list[str]:
    """Names of the local GPUs, as the driver prints them."""
    found = []
    for file in sorted(driver.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.MULTILINE)
        if model is not None:
            found.append(model[1].strip())
    return found


def _this_cpu() -> Gpu:
    """The catalogue's CPU entry, with the local memory."""
    host = host_memory_gib()
    return find_gpu("cpu") if host is None else replace(find_gpu("cpu"), memory_gib=host)


def host_memory_gib() -> float | None:
    """Host memory of this node, if the system reports it."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (ValueError, OSError):
        return None
