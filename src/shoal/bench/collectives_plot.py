"""Plots measured collectives: bandwidth by size with the link's, and times with the fitted lines."""

import io

from shoal.bench.collectives_report import CollectivesReport
from shoal.bench.sizes import show_size
from shoal.plan.speed.ring import OPERATIONS

# Colour-blind safe, with distinct markers for print.
STYLES = dict(zip(OPERATIONS, (("#0072B2", "o"), ("#D55E00", "s"), ("#009E73", "^")), strict=True))


def plot(report: CollectivesReport) -> bytes:
    """The plot as PNG bytes."""
    # Imported here, because only plots need it; without pyplot, which would look for a display.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    figure.suptitle(report.title())
    speeds, times = figure.subplots(1, 2)
    for operation in OPERATIONS:
        timings = report.timings(operation)
        if not timings:
            continue
        color, marker = STYLES[operation]
        sizes = [timing.bytes for timing in timings]
        ring_bytes = [report.ring_bytes(timing) for timing in timings]
        speeds.plot(
            sizes, [report.bus_bandwidth(one) / 1e9 for one in timings], color=color, marker=marker, label=operation
        )
        slowest = [ring / one.high / 1e9 for ring, one in zip(ring_bytes, timings, strict=True)]
        fastest = [ring / one.low / 1e9 for ring, one in zip(ring_bytes, timings, strict=True)]
        speeds.fill_between(sizes, slowest, fastest, color=color, alpha=0.2, linewidth=0)
        times.plot(
            sizes, [one.seconds * 1e3 for one in timings], color=color, marker=marker, linestyle="none", label=operation
        )
        if fit := report.fit(operation):
            times.plot(sizes, [fit.seconds(ring) * 1e3 for ring in ring_bytes], color=color, linewidth=1)
    if report.bandwidth is not None:
        name = report.link.name if report.link else "best measured"
        speeds.axhline(report.bandwidth / 1e9, color="black", linestyle=":", linewidth=1, label=f"link: {name}")
    speeds.set(title="bus bandwidth with interquartile range", ylabel="GB/s", ylim=(0, None))
    times.set(title="time, and latency + ring bytes / bandwidth", ylabel="milliseconds", yscale="log")
    ticks = sorted({timing.bytes for timing in report.measured.timings})
    for axes in (speeds, times):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, labels=[show_size(size) for size in ticks], rotation=30)
        axes.set_xlabel("size of the full tensor")
        axes.grid(alpha=0.3)
        axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    return picture.getvalue()
