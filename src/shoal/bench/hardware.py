"""Measures this machine, and writes the block `hardware` of a config, with which a run is forecast for it."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log
from pathlib import Path
from typing import Any

import torch

from shoal.bench import device_speed
from shoal.bench.collectives import measure_collectives
from shoal.bench.collectives_report import CollectivesReport
from shoal.bench.collectives_request import Request
from shoal.bench.host import FEW, MANY, HostTimes, measure_host
from shoal.bench.output import envelope
from shoal.catalogue.efficiency import FP32_MATMULS, IN_TRAINING, MEASURED_INNER, copied_share, efficiency
from shoal.catalogue.gpus import GPUS, Gpu, find_link, recognize
from shoal.catalogue.multiprocessors import fp32_lanes
from shoal.config.locate import write_yaml
from shoal.config.schema_hardware import GpuConfig
from shoal.files import write_atomically
from shoal.launch.join import cuda_devices, first_device, started_by_others
from shoal.mistakes import RunFailed, UserMistake
from shoal.parallel.device import BF16_CAPABILITY
from shoal.plan.machine import gpu_of, host_memory_gib, processor_name
from shoal.plan.speed.communication import HOP_SHARE
from shoal.plan.speed.host import EAGER_BLOCK_HOST, GRACE_HOST
from shoal.plan.terms import GIB

TERA, GIGA = 1e12, 1e9
# What the file begins with.
FIRST_WORDS = "# shoal bench hardware"
# The keys of `hardware.gpu` that are measured.
SPEEDS = {
    "matmul_tflops": ("matmuls in 16 bits", "TFLOP/s"),
    "fp8_matmul_tflops": ("matmuls in fp8", "TFLOP/s"),
    "fp32_matmul_tflops": ("matmuls in fp32", "TFLOP/s"),
    "attention_tflops": ("attention", "TFLOP/s"),
    "copy_gb_per_second": ("copies", "GB/s"),
}
LINK_REQUEST = Request(dtype="bf16", repeat=10, seconds=0.5)
# A difference from what the catalogue has that is worth a sentence: devices of one kind differ by less.
UNUSUAL = 0.1


@dataclass(frozen=True)
class HardwareReport:
    """What was measured, as the keys of `hardware` and as rows."""

    device: str
    processor: str
    gpu: GpuConfig
    link: dict[str, Any] | None
    host: HostTimes

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What was measured, and what the forecast has of such devices if the catalogue has them."""
        usual = usual_speeds(GPUS[self.gpu.like]) if self.is_known else {}
        measured = self.gpu.model_dump()
        rows = [
            {"what": what, "unit": unit, "measured": measured[key], "usual": usual.get(key)}
            for key, (what, unit) in SPEEDS.items()
            if measured[key] is not None
        ]
        block_ms = round(self.host.block_ms, 3)
        rows.append({"what": "host, per block", "unit": "ms", "measured": block_ms, "usual": self.usual_host})
        if self.link is not None:
            reached = self.link["gb_per_second"]
            rows.append({"what": "collectives", "unit": "GB/s", "measured": reached, "usual": None})
        return rows

    @property
    def usual_host(self) -> float:
        """Milliseconds per block that the forecast has."""
        return round(1e3 * EAGER_BLOCK_HOST * GRACE_HOST.get(GPUS[self.gpu.like].host_link.name, 1.0), 3)

    @property
    def is_known(self) -> bool:
        """Whether the catalogue has this kind of GPU."""
        known = recognize(self.device)
        return known is not None and known.name == self.gpu.like and not known.is_cpu

    @property
    def caveats(self) -> list[str]:
        return [*self.host.caveats, *filter(None, map(_difference, self.rows))]

    @property
    def block(self) -> dict[str, Any]:
        """The block `hardware`."""
        gpu = {key: value for key, value in self.gpu.model_dump().items() if value is not None}
        found: dict[str, Any] = {"gpu": gpu, "host_block_ms": round(self.host.block_ms, 3)}
        if self.link is not None:
            found["link"] = self.link
        return found

    def as_dict(self) -> dict[str, Any]:
        return envelope(
            "hardware",
            machine={"device": self.device, "processor": self.processor, "torch": torch.__version__},
            config={"blocks": [FEW, MANY]},
            rows=self.rows,
            caveats=self.caveats,
            hardware=self.block,
            spread=round(self.host.spread, 3),
        )

    def yaml(self) -> str:
        """A config that a run's config includes."""
        first = f"{FIRST_WORDS}, torch {torch.__version__}: {self.device}, {self.processor}\n"
        return first + write_yaml({"hardware": self.block})

    def text(self) -> str:
        lines = [f"{self.device}, {self.processor}, torch {torch.__version__}", ""]
        lines.append(f"{'':<20} {'measured':>14} {'usual':>10}")
        for row in self.rows:
            usual = "" if row["usual"] is None else f"{row['usual']:,.4g}"
            lines.append(f"{row['what']:<20} {row['measured']:>8,.4g} {row['unit']:<7} {usual:>8}")
        return "\n".join([*lines, "", *self.caveats]).rstrip()


def measure_hardware(*, devices: int | None, output: Path | None, report: Callable[[str], None]) -> HardwareReport:
    """The first device, the host, and the links between `devices` (all GPUs if None); written to `output`."""
    if started_by_others():
        raise UserMistake("bench hardware measures one machine: start it once on it, without torchrun, srun or mpirun.")
    _check_output(output)
    present, device = cuda_devices(), first_device()
    several = max(present, 1) if devices is None else devices
    links = None
    if several > 1:
        # Before this process uses a device, which others then could not have as a whole.
        report(f"measuring the collectives of {several} devices …")
        links = measure_collectives(LINK_REQUEST, devices=several)
        if not links.correct:
            raise RunFailed(links.fault())
    host = measure_host(device, report)
    found = _describe(device, report)
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    measured = HardwareReport(
        named,
        processor_name(),
        found,
        None if links is None else _link(links, gpu_of(found), on_gpu=device.type == "cuda"),
        host,
    )
    if output is not None:
        write_atomically(output, measured.yaml())
    return measured


def _check_output(output: Path | None) -> None:
    """Before anything is measured: whether the file can be written, and is none that somebody else has written."""
    if output is None:
        return
    if output.suffix not in (".yaml", ".yml"):
        raise UserMistake(f"--output {output}: the file is a config; call it {output.stem or 'machine'}.yaml.")
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise UserMistake(f"--output {output}: the folder {output.parent} does not exist or is not writable.")
    if output.exists() and not output.read_text(errors="replace").startswith(FIRST_WORDS):
        raise UserMistake(f"--output {output}: that file was not written by shoal bench hardware; give another name.")


def _describe(device: torch.device, report: Callable[[str], None]) -> GpuConfig:
    """The block `hardware.gpu` of `device`."""
    half = device_speed.half_dtype(device)
    report("measuring matmuls …")
    speeds: dict[str, float] = {
        "matmul_tflops": device_speed.matmul_flops(device, half) / TERA,
        "fp32_matmul_tflops": device_speed.matmul_flops(device, torch.float32) / TERA,
    }
    if device_speed.has_fp8(device):
        speeds["fp8_matmul_tflops"] = device_speed.fp8_matmul_flops(device) / TERA
    report("measuring attention and copies …")
    speeds["attention_tflops"] = device_speed.attention_flops(device, half) / TERA
    copied = device_speed.copied_bytes_per_second(device)
    speeds["copy_gb_per_second"] = copied / GIGA
    rounded = {key: float(f"{value:.4g}") for key, value in speeds.items()}
    return GpuConfig.model_validate({**_identity(device, copied), **rounded})


def _identity(device: torch.device, copied: float) -> dict[str, Any]:
    """Which device it is: that of the catalogue, or the most similar one, with its own size and peak."""
    if device.type != "cuda":
        memory = host_memory_gib()
        size = {} if memory is None else {"memory_gib": round(memory, 2)}
        return {"like": "cpu", "name": processor_name(), **size}
    properties = torch.cuda.get_device_properties(device)
    known = recognize(properties.name)
    found = {"name": properties.name, "memory_gib": round(properties.total_memory / GIB, 2)}
    if known is not None:
        return {"like": known.name, **found}
    if torch.version.hip is not None:
        return {"like": "mi300x", **found}
    capability, units = (properties.major, properties.minor), properties.multi_processor_count
    kilohertz = getattr(properties, "clock_rate", None)  # which not every release of torch has
    return {**found, **unknown_gpu(capability, units, 1e3 * kilohertz if kilohertz else None, copied)}


def unknown_gpu(capability: tuple[int, int], units: int, clock: float | None, copied: float) -> dict[str, Any]:
    """The keys of an NVIDIA GPU that the catalogue does not have: like the one of its architecture, or else of an older
    one, whose memory is about as fast, with the peak that its multiprocessors and their clock, if it is known, make."""
    known = {gpu.name: gpu.compute_capability for gpu in GPUS.values() if gpu.compute_capability is not None}
    # What has bf16 is like others that have it.
    able = {name: one for name, one in known.items() if (one >= BF16_CAPABILITY) == (capability >= BF16_CAPABILITY)}
    family = [name for name, one in able.items() if one == capability]
    older = [name for name, one in able.items() if one < capability]
    candidates = [GPUS[name] for name in family or older or able]
    like = min(candidates, key=lambda gpu: abs(log(copied_share(gpu) * gpu.memory_bandwidth / copied)))
    found = {
        "like": like.name,
        "multiprocessors": units,
        "compute_capability": ".".join(map(str, capability)),
    }
    if clock is None:
        return found
    fp32 = 2 * fp32_lanes(capability) * units * clock
    tflops = fp32 / like.fp32 * (like.bf16 or like.fp16) / TERA
    return {**found, "tflops": float(f"{tflops:.4g}")}


def usual_speeds(gpu: Gpu) -> dict[str, float]:
    """What the forecast has of a device of the catalogue, as the keys of `hardware.gpu`."""
    shares, peak = efficiency(gpu), gpu.bf16 or gpu.fp16
    fp32 = shares.fp32 or FP32_MATMULS * shares.matmuls
    found = {
        "matmul_tflops": shares.matmuls * peak / (1 + shares.inner_half / MEASURED_INNER) / TERA,
        "fp32_matmul_tflops": fp32 * gpu.fp32 / (1 + shares.wide_inner_half / MEASURED_INNER) / TERA,
        "attention_tflops": shares.attention * peak / TERA,
        "copy_gb_per_second": copied_share(gpu) * gpu.memory_bandwidth / GIGA,
    }
    if gpu.fp8 is not None:
        found["fp8_matmul_tflops"] = shares.fp8 * gpu.fp8 / IN_TRAINING / TERA
    return {key: float(f"{value:.4g}") for key, value in found.items()}


def _difference(row: Mapping[str, Any]) -> str | None:
    """A sentence if a speed is unusual for such a device."""
    if row["usual"] is None or row["unit"] == "ms" or abs(row["measured"] / row["usual"] - 1) <= UNUSUAL:
        return None
    more = row["measured"] / row["usual"] - 1
    than = f"{abs(more):.0%} {'more' if more > 0 else 'less'}"
    return f"{row['what'].capitalize()}: {than} than the forecast has of such devices."


def _link(found: CollectivesReport, gpu: Gpu, *, on_gpu: bool) -> dict[str, Any]:
    """What collectives of large tensors reach, the median of all three, and the latency as the forecast has it."""
    largest = max(timing.bytes for timing in found.measured.timings)
    reached = sorted(found.bus_bandwidth(timing) for timing in found.measured.timings if timing.bytes == largest)
    latency = find_link(gpu.link).latency
    fit = found.fit("all-gather")
    if not on_gpu and fit is not None:
        latency = fit.latency / (found.measured.ranks - 1) / HOP_SHARE
    return {
        "gb_per_second": float(f"{reached[len(reached) // 2] / GIGA:.4g}"),
        "latency_us": max(1e-3, float(f"{latency * 1e6:.4g}")),
        "measured": True,
    }
