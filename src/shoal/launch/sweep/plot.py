"""Plots a sweep: the metric of every member by step, and against each key that varies."""

import importlib.util
from pathlib import Path
from typing import Any

from shoal.launch.sweep.results import Result, Table
from shoal.mistakes import UserMistake

MOST_KEYS = 3
LABELLED = 10  # members in the legend: the best


def can_plot() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def plot_sweep(table: Table, path: Path) -> bool:
    """Write the plot to `path`, in the format of its suffix; False if there is nothing to plot yet."""
    if not can_plot():
        raise UserMistake("--plot needs matplotlib: pip install 'shoal[plot]'.")
    measured = [one for one in table.results if one.value is not None]
    if not measured:
        return False
    # Without pyplot, which would look for a display.
    from matplotlib.figure import Figure

    keys = list(dict.fromkeys(text.partition("=")[0] for one in measured for text in one.entry.member.overrides))
    figure = Figure(figsize=(5.5 * (1 + len(keys[:MOST_KEYS])), 4.5), layout="constrained")
    figure.suptitle(
        f"{table.sweep.folder}: {table.metric.name} ({'more' if table.metric.maximized else 'less'} is better)"
    )
    curves, *others = figure.subplots(1, 1 + len(keys[:MOST_KEYS]), squeeze=False)[0]
    for place, one in enumerate(measured):
        curve = table.metric.curve(one.lines)
        dashed = one.entry.state != "done"
        curves.plot(
            list(curve), list(curve.values()), marker="o" if len(curve) < 30 else None, markersize=3,
            linestyle="--" if dashed else "-", alpha=1.0 if place < LABELLED else 0.3,
            label=f"{one.entry.name}{f' ({one.entry.state})' if dashed else ''}" if place < LABELLED else None,
        )  # fmt: skip
    curves.set(xlabel="step", ylabel=table.metric.name)
    curves.legend(fontsize=6)
    for axes, key in zip(others, keys, strict=False):
        _against(axes, key, measured)
        axes.set(xlabel=key, ylabel=table.metric.name)
    for axes in (curves, *others):
        axes.grid(alpha=0.3)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UserMistake(f"--plot {path} cannot be written: {error}") from None
    return True


def _against(axes: Any, key: str, measured: list[Result]) -> None:
    """Points by the value of a key: numbers on an axis, logarithmic if they span a factor of 10; words side by side."""
    points = []
    for one in measured:
        given = dict(text.split("=", 1) for text in one.entry.member.overrides)
        if key in given:
            points.append((given[key], one.value, one.entry.state == "done"))
    numbers = [_number(text) for text, _, _ in points]
    numeric = None not in numbers
    places: list[Any] = numbers if numeric else [text for text, _, _ in points]
    for done in (True, False):
        chosen = [index for index, point in enumerate(points) if point[2] is done]
        if chosen:
            axes.scatter(
                [places[index] for index in chosen], [points[index][1] for index in chosen],
                color="#0072B2" if done else "#999999", marker="o" if done else "x",
            )  # fmt: skip
    known = [number for number in numbers if number is not None]
    if numeric and min(known) > 0 and max(known) >= 10 * min(known):
        axes.set_xscale("log")


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
