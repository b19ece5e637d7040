"""The micro-batch doubled until it no longer fits, with and without activation checkpointing, beside the forecast."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.bench.curves import (
    DOES_NOT_FIT,
    Figures,
    Report,
    caveats_of,
    forecast_device,
    forecast_figures,
    local_devices,
    measured_figures,
    where,
    with_keys,
)
from shoal.bench.output import envelope
from shoal.bench.sizes import show_seconds
from shoal.bench.steps import RanOutOfMemory
from shoal.config.load import config_values
from shoal.config.mesh import divide_processes
from shoal.config.schema import Config
from shoal.mistakes import RunFailed, UserMistake

RECOMPUTE = ("none", "full")
# A host's memory has no clear limit, and its time is no use to anyone: where a CPU stops without --up-to.
MOST_ON_CPU = 8
MOST = 1 << 14


@dataclass(frozen=True)
class Point:
    """One micro-batch with one kind of activation checkpointing."""

    recompute: str
    micro_batch: int
    measured: Figures | None
    forecast: Figures | None
    out_of_memory: bool = False


@dataclass(frozen=True)
class BatchReport:
    """The points of both curves."""

    points: Sequence[Point]
    machine: Mapping[str, Any]
    config: Config
    devices: int
    caveats: Sequence[str]

    def points_of(self, recompute: str) -> list[Point]:
        return [point for point in self.points if point.recompute == recompute]

    def largest(self, recompute: str) -> dict[str, int | None]:
        """The largest micro-batch that was measured, and that the forecast says fits, among those of the rows."""
        points = self.points_of(recompute)
        return {
            "measured": max((one.micro_batch for one in points if one.measured is not None), default=None),
            "forecast": max((one.micro_batch for one in points if one.forecast and one.forecast.fits), default=None),
        }

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "recompute": one.recompute,
                "micro_batch": one.micro_batch,
                "out_of_memory": one.out_of_memory,
                "measured": None if one.measured is None else one.measured.as_dict(),
                "forecast": None if one.forecast is None else one.forecast.as_dict(),
            }
            for one in self.points
        ]

    def as_dict(self) -> dict[str, Any]:
        return envelope(
            "batch",
            machine=self.machine,
            config=config_values(self.config),
            rows=self.rows(),
            caveats=self.caveats,
            forecast_for=forecast_device(self.config),
            devices=self.devices,
            largest={recompute: self.largest(recompute) for recompute in RECOMPUTE},
        )

    def text(self) -> str:
        devices = f"{self.devices} {'device' if self.devices == 1 else 'devices'}"
        lines = [
            f"{self.config.name} on {devices}{where(self.machine, self.config)}",
            "",
            f"{'':25} {'measured':32} forecast",
            " ".join([f"{'recompute':9} {'micro-batch':>13}  ", _HEAD, _HEAD]),
        ]
        for one in self.points:
            measured = f"{'out of memory':31}" if one.out_of_memory else _figures(one.measured)
            lines.append(f"{one.recompute:9} {one.micro_batch:13}   {measured} {_figures(one.forecast)}".rstrip())
        unfit = [DOES_NOT_FIT] if any(one.forecast and one.forecast.fits is False for one in self.points) else []
        return "\n".join([*lines, "", *unfit, *self.caveats]).rstrip()


_HEAD = f"{'step':>8} {'tokens/s':>12} {'GiB':>8} "


def _figures(figures: Figures | None) -> str:
    if figures is None:
        return f"{'–':>8}{'':23}"
    memory = f"{figures.allocated_gib:.2f}" + ("!" if figures.fits is False else " ")
    return f"{show_seconds(figures.step_seconds):>8} {figures.tokens_per_second:12,.0f} {memory:>9}"


def measure_batches(
    config: Config, *, up_to: int | None, steps: int, warmup: int, measures: bool, report: Report
) -> BatchReport:
    """Both curves, on the devices of `config` that this machine has."""
    present, on_cpu = local_devices() if measures else (0, False)
    wanted = config.hardware.devices
    devices = wanted if wanted != "auto" else max(1, present if not on_cpu else 1)
    if measures and devices > present:
        raise UserMistake(
            f"hardware.devices is {devices}, but this machine has {present} {'cores' if on_cpu else 'GPUs'}; "
            "add --no-measure for the forecast alone."
        )
    most = up_to or (MOST_ON_CPU if on_cpu else MOST)
    points: list[Point] = []
    failures: list[str] = []
    machine: Mapping[str, Any] = {}
    for recompute in RECOMPUTE:
        size, tries = 1, measures
        while size <= most:
            changed = _with_batch(config, size, recompute, devices)
            forecast, measured, ran_out = forecast_figures(changed, devices), None, False
            if tries:
                report(f"measuring micro-batch {size}, train.recompute={recompute} …")
                try:
                    measured, found = measured_figures(changed, steps=steps, warmup=warmup, report=lambda _: None)
                    machine = found.machine
                except RanOutOfMemory:
                    tries, ran_out = False, True
                except RunFailed as failure:
                    if not machine:  # nothing works, so there is no result to keep
                        raise
                    tries = False
                    failures.append(f"Micro-batch {size} with train.recompute={recompute} was not measured: {failure}")
            points.append(Point(recompute, size, measured, forecast, ran_out))
            if not tries and (forecast is None or not forecast.fits):
                break  # neither the device nor the forecast goes further
            size *= 2
    caveats = caveats_of(config, on_cpu=on_cpu, several=devices > 1)
    if on_cpu:
        caveats.append("On a CPU, memory is that of the whole process, with Python and its libraries.")
        if up_to is None:
            caveats.append(f"A CPU stops at a micro-batch of {MOST_ON_CPU}; --up-to sets another limit.")
    return BatchReport(points, machine, config, devices, [*failures, *caveats])


def _with_batch(config: Config, size: int, recompute: str, devices: int) -> Config:
    """One micro-batch per step on each data-parallel rank."""
    return with_keys(
        config,
        {
            "train.micro_batch": size,
            "train.grad_accum": None,
            "train.global_batch": size * divide_processes(config.parallel, devices),
            "train.recompute": recompute,
            "train.on_oom": "stop",  # not a smaller micro-batch: that memory runs out is the result
            "hardware.devices": devices,
            "hardware.nodes": 1,
        },
    )
