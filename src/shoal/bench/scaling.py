"""The same job on more and more devices: time, speed-up, efficiency and memory, beside the forecast."""

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
from shoal.config.load import config_values
from shoal.config.resolve import with_global_batch
from shoal.config.schema import Config
from shoal.mistakes import UserMistake


@dataclass(frozen=True)
class Point:
    """One strategy on one number of devices."""

    strategy: str
    devices: int
    measured: Figures | None
    forecast: Figures | None


@dataclass(frozen=True)
class Scaled:
    """Relative to the fewest devices."""

    speedup: float
    efficiency: float


def scaling_of(seconds: Mapping[int, float]) -> dict[int, Scaled]:
    """Speed-up and efficiency by number of devices, from the seconds of one step of the same global batch.

    With T(1): speed-up T(1) / T(N), efficiency T(1) / (N · T(N)). Without it, the fewest devices count as perfectly
    efficient.
    """
    if not seconds:
        return {}
    fewest = min(seconds)
    work = seconds[fewest] * fewest
    return {devices: Scaled(work / time, work / (devices * time)) for devices, time in sorted(seconds.items())}


@dataclass(frozen=True)
class ScalingReport:
    """The points of all strategies."""

    points: Sequence[Point]
    machine: Mapping[str, Any]
    config: Config
    caveats: Sequence[str]

    @property
    def strategies(self) -> list[str]:
        """Without `single`, which is the first point of each."""
        return list(dict.fromkeys(point.strategy for point in self.points if point.devices > 1)) or ["single"]

    def points_of(self, strategy: str) -> list[Point]:
        """Of one strategy, with the single device that it is compared with."""
        return [point for point in self.points if point.strategy == strategy or point.devices == 1]

    def scaled(self, strategy: str, kind: str) -> dict[int, Scaled]:
        """`kind`: measured or forecast."""
        known = ((point.devices, getattr(point, kind)) for point in self.points_of(strategy))
        return scaling_of({devices: figures.step_seconds for devices, figures in known if figures is not None})

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for point in self.points:
            row: dict[str, Any] = {"strategy": point.strategy, "devices": point.devices}
            for kind in ("measured", "forecast"):
                figures: Figures | None = getattr(point, kind)
                scaled = self.scaled(point.strategy, kind).get(point.devices)
                row[kind] = None
                if figures is not None and scaled is not None:
                    ratios = {"speedup": round(scaled.speedup, 4), "efficiency": round(scaled.efficiency, 4)}
                    row[kind] = figures.as_dict() | ratios
            found.append(row)
        return found

    def as_dict(self) -> dict[str, Any]:
        return envelope(
            "scaling",
            machine=self.machine,
            config=config_values(self.config),
            rows=self.rows(),
            caveats=self.caveats,
            forecast_for=forecast_device(self.config),
            global_batch=self.config.train.global_batch,
        )

    def text(self) -> str:
        lines = [
            f"{self.config.name}, global batch {self.config.train.global_batch}{where(self.machine, self.config)}",
            "",
            f"{'':17} {'measured':48} forecast",
            " ".join([f"{'strategy':8} {'devices':>7}  ", _HEAD, _HEAD]),
        ]
        for row in self.rows():
            both = " ".join(_figures(row[kind]) for kind in ("measured", "forecast"))
            lines.append(f"{row['strategy']:8} {row['devices']:7}   {both}".rstrip())
        unfit = [DOES_NOT_FIT] if any(one.forecast and one.forecast.fits is False for one in self.points) else []
        return "\n".join([*lines, "", *unfit, *self.caveats]).rstrip()


_HEAD = f"{'step':>8} {'epoch':>8} {'speed-up':>8} {'efficiency':>10} {'GiB':>8} "


def _figures(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return f"{'–':>8}{'':39}"
    epoch = "–" if row["epoch_seconds"] is None else show_seconds(row["epoch_seconds"])
    allocated = row["allocated_gib"]
    memory = f"{allocated:.{2 if allocated >= 0.1 else 4}f}" + ("!" if row["fits"] is False else " ")
    step = show_seconds(row["step_seconds"])
    return f"{step:>8} {epoch:>8} {row['speedup']:8.2f} {row['efficiency']:10.0%} {memory:>9}"


def measure_scaling(
    config: Config,
    devices: Sequence[int],
    strategies: Sequence[str],
    *,
    steps: int,
    warmup: int,
    measures: bool,
    report: Report,
) -> ScalingReport:
    """Every strategy on every number of devices, with the global batch of the largest."""
    counts = sorted(set(devices))
    if not counts or counts[0] < 1:
        raise UserMistake("--devices takes numbers of devices from 1 on, such as 1,2,4,8.")
    config = with_global_batch(config, counts[-1])
    batch = config.train.global_batch
    if uneven := [count for count in counts if batch % count]:
        raise UserMistake(
            f"train.global_batch {batch} is not a multiple of {uneven[0]} devices; choose one that is a multiple of "
            f"all of --devices, such as train.global_batch={batch * counts[-1]}."
        )
    most, on_cpu = local_devices() if measures else (0, False)
    wanted = [("single", 1)] if 1 in counts else []
    wanted += [(strategy, count) for strategy in strategies for count in counts if count > 1]
    points, machine, sequences = [], {}, None
    for strategy, count in wanted:
        changed = _on(config, strategy, count)
        measured = None
        if count <= most:
            report(f"measuring {strategy} on {count} {'device' if count == 1 else 'devices'} …")
            measured, found = measured_figures(changed, steps=steps, warmup=warmup, report=lambda _: None)
            machine, sequences = found.machine, found.sequences
        # In nodes as large as the config says, or of eight devices.
        planned = with_keys(changed, {"hardware.devices": config.hardware.devices})
        points.append(Point(strategy, count, measured, forecast_figures(planned, count, sequences)))
    caveats = caveats_of(config, on_cpu=on_cpu, several=counts[-1] > 1)
    if measures and counts[-1] > most:
        what = "cores" if on_cpu else "GPUs"
        caveats.append(f"This machine has {most} {what}: more devices are forecast only.")
    return ScalingReport(points, machine, config, caveats)


def _on(config: Config, strategy: str, devices: int) -> Config:
    """`config` on this many devices, with a micro-batch that its share of the global batch is a multiple of."""
    changes: dict[str, Any] = {"parallel.strategy": strategy, "hardware.devices": devices, "hardware.nodes": 1}
    if isinstance(config.train.micro_batch, int):
        share = config.train.global_batch // devices
        fitting = [size for size in range(1, config.train.micro_batch + 1) if share % size == 0]
        changes["train.micro_batch"] = fitting[-1]
    return with_keys(config, changes)
