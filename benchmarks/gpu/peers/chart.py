"""Bar chart of the speeds: ours next to the other tools, one group per job."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from peers.cases import JOBS
from peers.measure import MEASURED
from peers.report import Report

OURS, THEIRS = "#0072B2", "#B0B0B0"


def draw(path: Path, report: Report) -> None:
    """Draw the chart. Does nothing without matplotlib or without results."""
    groups = {
        heading: [case for case in report.cases.values() if case["job"] == job and case["status"] == MEASURED]
        for job, heading in JOBS.items()
    }
    groups = {heading: members for heading, members in groups.items() if members}
    if not groups or find_spec("matplotlib") is None:
        return
    # Not pyplot, which would look for a display.
    from matplotlib.figure import Figure

    heights = [len(members) for members in groups.values()]
    figure = Figure(figsize=(11, 0.27 * sum(heights) + 0.38 * len(groups) + 0.5), layout="constrained")
    gpu = report.machine["gpu"] or "CPU"
    figure.suptitle(f"Training speed on one {gpu}: tokens per second, and peak allocated memory", fontsize=12)
    all_axes = figure.subplots(len(groups), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, (heading, members) in zip(all_axes, groups.items(), strict=True):
        _draw_group(axes, heading, members)
    figure.savefig(path, dpi=120)


def _draw_group(axes: Any, heading: str, members: list[dict[str, Any]]) -> None:
    speeds = [case["tokens_per_second"] for case in members]
    bars = axes.barh(
        [case["label"] for case in members],
        speeds,
        color=[OURS if case["ours"] else THEIRS for case in members],
        height=0.72,
    )
    memory = [case["allocated_gib"] for case in members]
    notes = [
        f" {speed:,.0f}" + ("" if gib is None else f"   {gib:.1f} GiB")
        for speed, gib in zip(speeds, memory, strict=True)
    ]
    axes.bar_label(bars, notes, fontsize=8)
    axes.set_title(heading, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlim(0, max(speeds) * 1.25)
    axes.set_ylim(len(members) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
