"""What a run is planned for: the devices and connections that the config names, or those that are here."""

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.catalogue.gpus import Gpu, Link, find_gpu, find_link, recognise
from shoal.config.schema import GpuConfig, HardwareConfig, LinkConfig
from shoal.plan.terms import GIB

# Where NVIDIA's driver says what is here, without any library.
DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Machine:
    """Devices, how many, and what is between them."""

    gpu: Gpu
    link: Link
    network: Link
    devices: int  # in each node
    nodes: int = 1
    host_gib: float | None = None  # main memory of a node
    price: float | None = None  # of a device and hour
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
    """The machine that `hardware` describes; what it leaves open is looked up here."""
    notes: list[str] = []
    present = _present(driver)
    if isinstance(hardware.gpu, GpuConfig):
        gpu = _given(hardware.gpu)
    elif hardware.gpu != "auto":
        gpu = find_gpu(hardware.gpu)
    else:
        found = [known for name in present if (known := recognise(name)) is not None]
        gpu = found[0] if found else _this_cpu()
        if present and not found:
            notes.append(
                f"The device here, {present[0]}, is not in the catalogue, so this is for its CPU; set hardware.gpu."
            )
        elif not present:
            notes.append("There is no GPU here, so this is for the CPU; set hardware.gpu to plan for another device.")
    devices = hardware.devices
    if devices == "auto":
        devices = len(present) if present and hardware.gpu == "auto" else 1
        if not gpu.is_cpu and hardware.gpu != "auto":
            notes.append("One device; set hardware.devices and hardware.nodes to plan for more.")
    if gpu.is_cpu:
        gpu = replace(gpu, memory_gib=gpu.memory_gib / devices)  # which processes of one machine share
    return Machine(
        gpu=gpu,
        link=_link(hardware.link, gpu.link),
        network=_link(hardware.network, usual_network(gpu)),
        devices=devices,
        nodes=hardware.nodes,
        host_gib=hardware.host_gib or (host_memory_gib() if hardware.gpu == "auto" else None),
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
    """The machine that a process finds itself on: the device's name as the driver prints it, and its real memory.

    None for both means the CPU. A device that the catalogue does not have is counted as an A100 of its memory: whether
    a run fits does not depend on that, and of two strategies the faster one hardly does. What is between devices cannot
    be seen: it is what `hardware` says, or what such devices usually have.
    """
    if printed is None or memory_gib is None:
        gpu = _this_cpu()
        if host_gib is not None:
            gpu = replace(gpu, memory_gib=host_gib)
        gpu = replace(gpu, memory_gib=gpu.memory_gib / devices)  # which processes of one machine share
    else:
        gpu = replace(recognise(printed) or find_gpu("a100-80gb"), memory_gib=memory_gib)
    return Machine(
        gpu=gpu,
        link=_link("auto" if hardware is None else hardware.link, gpu.link),
        network=_link("auto" if hardware is None else hardware.network, usual_network(gpu)),
        devices=devices,
        nodes=nodes,
        host_gib=host_gib,
    )


def usual_network(gpu: Gpu) -> str:
    """The connection between machines that such devices usually have; one port for each device."""
    if gpu.is_cpu:
        return "ethernet-10"
    if gpu.name.startswith("mi"):
        return "infiniband-hdr" if gpu.name == "mi250" else "infiniband-ndr"
    if not gpu.link.startswith("nvlink"):
        return "ethernet-25"
    return "infiniband-ndr" if (gpu.compute_capability or (0, 0)) >= (9, 0) else "infiniband-hdr"


def _link(wanted: str | LinkConfig, usual: str) -> Link:
    if isinstance(wanted, LinkConfig):
        return Link("as given", wanted.gb_per_second * 1e9, wanted.latency_us * 1e-6)
    return find_link(usual if wanted == "auto" else wanted)


def _given(wanted: GpuConfig) -> Gpu:
    gpu = find_gpu(wanted.like)
    if wanted.memory_gib is not None:
        gpu = replace(gpu, memory_gib=wanted.memory_gib)
    if wanted.gb_per_second is not None:
        gpu = replace(gpu, memory_bandwidth=wanted.gb_per_second * 1e9)
    if wanted.tflops is not None:
        peak = wanted.tflops * 1e12
        # The other peaks are in the same proportion as on the device it is like.
        ratio = peak / (gpu.bf16 or gpu.fp16)
        gpu = replace(
            gpu,
            bf16=peak if gpu.bf16 else None,
            fp16=peak,
            fp32=gpu.fp32 * ratio,
            fp8=gpu.fp8 * ratio if gpu.fp8 else None,
        )
    return gpu


def _present(driver: Path) -> list[str]:
    """Names of the GPUs of this machine, as the driver prints them."""
    found = []
    for file in sorted(driver.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", file.read_text(errors="replace"), re.MULTILINE)
        if model is not None:
            found.append(model[1].strip())
    return found


def _this_cpu() -> Gpu:
    """The CPU's stand-in of the catalogue, with the memory that is here."""
    host = host_memory_gib()
    return find_gpu("cpu") if host is None else replace(find_gpu("cpu"), memory_gib=host)


def host_memory_gib() -> float | None:
    """Main memory of this machine, where the system says."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    except (ValueError, OSError):
        return None
