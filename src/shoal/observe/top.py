"""A run in the terminal: what `shoal top` draws."""

import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from shoal.observe import figures
from shoal.observe.curve import Point, draw_curve, thinned
from shoal.observe.events import FAULT, RESTART, SAVE, STOP, WARNING
from shoal.observe.progress import duration, format_metrics
from shoal.observe.run_view import RunView

TITLES = {
    "loss": "loss",
    "eval_loss": "evaluation loss",
    "tokens_per_second": "tokens/s",
    "samples_per_second": "samples/s",
    "lr": "learning rate",
    "grad_norm": "gradient norm",
}
HEIGHT = 5  # lines of a curve
EVENTS_SHOWN = 6
NARROW = 80  # columns below which curves are not side by side: their captions would be cut off
QUIET = 60.0  # seconds without a line after which it is said


def render(
    view: RunView, name: str, state: str, detail: str, width: int, *, ascii_only: bool = False
) -> RenderableType:
    """Everything that is known of a run, `width` characters wide."""
    parts: list[RenderableType] = [_head(view, name, state, detail)]
    curves = [(TITLES[key], view.curve(key)) for key in TITLES]
    columns = 1 if width < NARROW else 2
    drawn = [_panel(title, points, width // columns - 4, ascii_only) for title, points in curves if points]
    table = Table.grid(expand=True)
    for _ in range(columns):
        table.add_column(ratio=1)
    for first in range(0, len(drawn), columns):
        table.add_row(*drawn[first : first + columns])
    if drawn:
        parts.append(table)
    if happened := _events(view):
        parts.append(happened)
    return Group(*parts)


def _head(view: RunView, name: str, state: str, detail: str) -> Text:
    newest, total = view.newest, view.steps
    text = Text()
    text.append(name, style="bold")
    text.append(f"  {state}", style={"running": "green", "finished": "green", "failed": "red"}.get(state, "yellow"))
    if newest:
        text.append(f"  step {newest['step']}/{total or '?'}")
    if detail:
        text.append(f"\n{detail.splitlines()[0]}", style="red")
    if newest:
        try:
            text.append("\n" + format_metrics(newest, (total or 0) if state == "running" else 0, view.trend))
        except (KeyError, TypeError, ValueError):
            text.append(f"\nloss {newest.get('loss')}")
        silent = time.time() - newest.get("time", time.time())
        if state == "running" and silent > QUIET + 2 * (newest.get("seconds") or 0):
            text.append(f"\nno line for {duration(silent)}", style="yellow")
    else:
        text.append("\nno step was logged yet")
    return text


def _panel(title: str, points: Sequence[Point], width: int, ascii_only: bool) -> Panel:
    values = [value for _, value in points]
    lines = draw_curve(thinned(points, 2 * max(1, width)), max(1, width), HEIGHT, ascii_only=ascii_only)
    between = f"{shown(min(values))} to {shown(max(values))}"
    steps = f", step {points[0][0]:.0f} to {points[-1][0]:.0f}"
    if len(between + steps) < width:  # a longer one would be cut, in the middle of a number
        between += steps
    title = f"{title}  {shown(values[-1])}"
    return Panel(Text("\n".join(lines)), title=title, title_align="left", subtitle=between, subtitle_align="right")


def shown(value: float) -> str:
    """A number in few characters: 2.346, 12,345 or 3.00e-04."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) >= 0.01 or value == 0 else f"{value:.2e}"


def _events(view: RunView) -> RenderableType | None:
    saves = [one for one in view.of_kind(SAVE) if one.get("ok")]
    table = Table.grid(padding=(0, 2))
    if saves:
        newest = saves[-1]
        size = f", {figures.size(newest['bytes'])}" if newest.get("bytes") else ""
        seconds = f" in {newest['seconds']:.1f} s" if isinstance(newest.get("seconds"), int | float) else ""
        table.add_row("checkpoints", f"{len(saves)} written, the newest at step {newest['step']}{seconds}{size}")
    for kind, style in ((RESTART, "yellow"), (FAULT, "red"), (WARNING, "yellow"), (STOP, "")):
        found = view.of_kind(kind)
        for one in found[-EVENTS_SHOWN:]:
            table.add_row(kind, Text(f"{_when(one)} step {one.get('step', '?')}: {_said(one)}", style=style))
        if len(found) > EVENTS_SHOWN:
            table.add_row("", f"and {len(found) - EVENTS_SHOWN} before")
    for one in view.of_kind(SAVE):
        if not one.get("ok", True):
            table.add_row("save", Text(f"{_when(one)} step {one.get('step', '?')}: {one.get('error')}", style="red"))
    return table if table.row_count else None


def _said(event: dict[str, Any]) -> str:
    lines = str(event.get("text") or event.get("reason") or "").strip().splitlines()
    return lines[0] if lines else ""


def _when(event: dict[str, Any]) -> str:
    found = event.get("time")
    return f"{datetime.fromtimestamp(found):%m-%d %H:%M:%S}" if isinstance(found, int | float) else ""
