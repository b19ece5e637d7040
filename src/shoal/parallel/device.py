"""The device this process runs on."""

import os
from dataclasses import dataclass

import torch

from shoal.catalogue.gpus import Gpu, recognize
from shoal.config.resolve import auto_precision

# The first GPUs whose tensor cores support bf16: Ampere.
BF16_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class Device:
    """What is known of the accelerator. A CPU has neither a peak throughput nor memory of its own."""

    gpu: Gpu | None
    memory_gib: float | None
    capability: tuple[int, int] | None = None  # of CUDA
    name: str | None = None  # as the driver prints it

    @property
    def auto_precision(self) -> str:
        """What `train.precision: auto` means here. ROCm's capabilities are all newer than bf16."""
        return auto_precision(is_cpu=self.capability is None, has_bf16=(self.capability or (0, 0)) >= BF16_CAPABILITY)

    def peak(self, precision: str) -> float | None:
        """Peak FLOPs per second of the tensor cores, for MFU; None if unknown or on a CPU."""
        if self.gpu is None:
            return None
        if precision == "32-true":
            return self.gpu.fp32
        return self.gpu.fp16 if precision == "16-mixed" else self.gpu.bf16


def describe_machine(device: torch.device) -> dict[str, str | int]:
    """What measurements depend on, and nothing that would identify the machine's owner."""
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        # The cores this process may use; macOS does not report them.
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    }


def inspect_device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(None, None)
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    return Device(recognize(properties.name), properties.total_memory / 2**30, capability, properties.name)
