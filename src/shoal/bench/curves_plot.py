"""Plots of `bench scaling` and `bench batch`: what was measured as lines, the forecast dashed."""

import io
from collections.abc import Sequence
from typing import Any

from shoal.bench.batch import RECOMPUTE, BatchReport
from shoal.bench.curves import Figures, forecast_device
from shoal.bench.scaling import ScalingReport

# Colour-blind safe, with distinct markers for print.
STYLES = (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^"), ("#CC79A7", "D"), ("#E69F00", "v"), ("#56B4E9", "P"))
KINDS = (("measured", "-"), ("forecast", "--"))


def plot_scaling(report: ScalingReport) -> bytes:
    """Speed-up with the ideal line, and efficiency, by number of devices: a PNG."""
    figure, (speedups, efficiencies) = _figure(f"{report.config.name}: the same global batch on more devices")
    counts = sorted({point.devices for point in report.points})
    for strategy, (color, marker) in zip(report.strategies, STYLES, strict=False):
        for kind, line in KINDS:
            found = report.scaled(strategy, kind)
            style = {"color": color, "marker": marker, "linestyle": line, "label": f"{strategy}, {kind}"}
            if found:
                speedups.plot(list(found), [one.speedup for one in found.values()], **style)
                efficiencies.plot(list(found), [one.efficiency * 100 for one in found.values()], **style)
    speedups.plot(counts, counts, color="black", linestyle=":", label="ideal")
    efficiencies.axhline(100, color="black", linestyle=":", label="ideal")
    speedups.set_yscale("log", base=2)  # as the devices, so that the ideal is a straight line
    speedups.set_yticks(counts, labels=[str(count) for count in counts])
    speedups.set(title="speed-up", ylabel="T(1) / T(N)")
    efficiencies.set(title="efficiency", ylabel="T(1) / (N · T(N)), %", ylim=(0, None))
    return _finish(figure, (speedups, efficiencies), "devices", counts)


def plot_batches(report: BatchReport) -> bytes:
    """Memory and tokens per second by micro-batch: a PNG."""
    figure, (memory, speed) = _figure(f"{report.config.name}: micro-batch on {report.devices} × device")
    for recompute, (color, marker) in zip(RECOMPUTE, STYLES, strict=False):
        for kind, line in KINDS:
            found: list[tuple[int, Figures]] = [
                (point.micro_batch, figures)
                for point in report.points_of(recompute)
                if (figures := getattr(point, kind)) is not None
            ]
            style = {"color": color, "marker": marker, "linestyle": line, "label": f"recompute {recompute}, {kind}"}
            if found:
                memory.plot([size for size, _ in found], [one.allocated_gib for _, one in found], **style)
                speed.plot([size for size, _ in found], [one.tokens_per_second for _, one in found], **style)
    device = forecast_device(report.config)
    memory.axhline(device["memory_gib"], color="black", linestyle=":", label=f"memory of {device['gpu']}")
    memory.set(title="memory per device", ylabel="GiB", ylim=(0, None))
    speed.set(title="speed of all devices", ylabel="tokens/s", ylim=(0, None))
    return _finish(figure, (memory, speed), "micro-batch", sorted({point.micro_batch for point in report.points}))


def _figure(title: str) -> tuple[Any, Any]:
    # Imported here, because only plots need it; without pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(1, 2)


def _finish(figure: Any, panels: Sequence[Any], label: str, ticks: Sequence[int]) -> bytes:
    for axes in panels:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[str(tick) for tick in ticks])
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
