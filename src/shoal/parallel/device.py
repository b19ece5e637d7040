"""What this process runs on."""

from dataclasses import dataclass

import torch

from shoal.catalogue.gpus import Gpu, recognise


@dataclass(frozen=True)
class Device:
    """The accelerator, as far as it is known. A CPU has neither a peak nor memory of its own."""

    gpu: Gpu | None
    memory_gib: float | None

    def peak(self, precision: str) -> float | None:
        """Operations a second of the matrix units, for MFU; None where that means nothing."""
        if self.gpu is None:
            return None
        if precision == "32-true":
            return self.gpu.fp32
        return self.gpu.fp16 if precision == "16-mixed" else self.gpu.bf16


def inspect_device(device: torch.device) -> Device:
    if device.type != "cuda":
        return Device(None, None)
    properties = torch.cuda.get_device_properties(device)
    return Device(recognise(properties.name), properties.total_memory / 2**30)
