"""What `bench scaling` and `bench batch` share: a config with a few keys changed, measured and forecast."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shoal.bench.forecast import machine_of
from shoal.bench.steps import SHARED_CORES, Steps, measure
from shoal.config.load import config_from_mapping, config_values
from shoal.config.schema import Config
from shoal.mistakes import UserMistake
from shoal.plan.decide import choose
from shoal.plan.machine import read_machine
from shoal.plan.models import read_shape
from shoal.plan.terms import GIB

Report = Callable[[str], None]
DOES_NOT_FIT = "! does not fit into the device's memory."


@dataclass(frozen=True)
class Figures:
    """One run, measured or forecast; None: not known."""

    step_seconds: float
    tokens_per_second: float
    allocated_gib: float
    reserved_gib: float | None
    mfu: float | None = None
    epoch_seconds: float | None = None
    fits: bool | None = None  # of a forecast

    def as_dict(self) -> dict[str, Any]:
        return {
            key: float(f"{value:.6g}") if isinstance(value, float) else value for key, value in asdict(self).items()
        }


def with_keys(config: Config, changes: Mapping[str, Any]) -> Config:
    """The config with dotted keys replaced, checked again."""
    values = config_values(config)
    for dotted, value in changes.items():
        block, key = dotted.split(".")
        values[block][key] = value
    return config_from_mapping(values)


def measured_figures(config: Config, *, steps: int, warmup: int, report: Report) -> tuple[Figures, Steps]:
    """A few training steps of `config` on this machine."""
    found = measure(config, steps=steps, warmup=warmup, worker_options=[], share=1, report=report)
    epoch = None if not found.sequences else found.step_seconds * found.sequences / found.chosen["global_batch"]
    figures = Figures(
        found.step_seconds, found.tokens_per_second, found.allocated_gib, found.reserved_gib, found.mfu, epoch
    )
    return figures, found


def forecast_figures(config: Config, world_size: int, sequences: int | None = None) -> Figures | None:
    """What the plan says of `config` on this many of its devices; None if it refuses."""
    try:
        choice = choose(config, read_shape(config.model), machine_of(config, world_size))
    except UserMistake:
        return None
    seconds = choice.speed.step_seconds
    return Figures(
        step_seconds=seconds,
        tokens_per_second=choice.speed.tokens_per_second_per_gpu * world_size,
        allocated_gib=choice.memory.worst.allocated / GIB,
        reserved_gib=choice.memory.reserved / GIB,
        mfu=None if choice.machine.is_cpu else choice.speed.mfu,
        epoch_seconds=None if not sequences else seconds * sequences / choice.global_batch,
        fits=choice.fits,
    )


def forecast_device(config: Config) -> dict[str, Any]:
    """The device that the forecast is for."""
    machine = read_machine(config.hardware)
    return {"gpu": machine.gpu.name, "memory_gib": round(machine.gpu.memory_gib, 2), "link": machine.link.name}


def where(machine: Mapping[str, Any], config: Config) -> str:
    """For the headline: on which device was measured, if any was, and for which it is forecast."""
    measured = f", measured on {machine['device']}" if machine else ""
    return f"{measured}, forecast for {forecast_device(config)['gpu']}"


def caveats_of(config: Config, *, on_cpu: bool, several: bool) -> list[str]:
    """What a reader has to know of the rows."""
    found = [SHARED_CORES] if on_cpu and several else []
    if on_cpu and read_machine(config.hardware).is_cpu:
        found.append("The forecast is for this CPU, and rough; set hardware.gpu, such as h100-80gb, to forecast GPUs.")
    elif on_cpu:
        gpu = forecast_device(config)["gpu"]
        found.append(f"Measured on a CPU, forecast for {gpu}: the two are not comparable, only the shapes of curves.")
    return found


def local_devices() -> tuple[int, bool]:
    """(how many devices may be measured, whether they are a CPU's cores)."""
    from shoal.launch.join import cuda_devices

    present = cuda_devices()
    return (present, False) if present else (os.cpu_count() or 1, True)
