"""The pages about runs: their list, one of them, and several compared. A run's page is its report, live."""

import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from shoal.observe import figures
from shoal.observe.charts import charts_of, compared_charts
from shoal.observe.html import Html, section, tag
from shoal.observe.report import CHARTS, badge, run_sections, steps_bar
from shoal.observe.report_compare import compared_sections
from shoal.observe.results import results_of
from shoal.observe.run_reader import RunRecord, number
from shoal.ui.folder import RunsFolder

MOST_DRAWN = 8  # runs whose curves are in the chart above the list: the colours there are
POINTS = 60  # of a run's small curve

Page = tuple[list[Html], list[dict[str, Any]]]  # sections and charts


def list_page(folder: RunsFolder, names: Sequence[str]) -> Page:
    """The list of all runs, the one that wrote last first, and the loss of the first of them."""
    found = [(name, run) for name in names if (run := folder.read(name, config=False)) is not None]
    found.sort(key=lambda one: (one[1].state != "running", -last_written(one[1])))
    drawn = [(_shown(name, run), run) for name, run in found if run.training][:MOST_DRAWN]
    charts = compared_charts(drawn, only=["loss"])
    head = tag(
        "header",
        tag("div", tag("h1", "Runs"), class_="title"),
        tag("p", f"{figures.counted(len(found), 'run')} below {folder.given}", class_="subtitle"),
        id="headline",
        data_live=True,
    )
    if not found:
        return [head, _empty()], []
    items = [_item(name, run) for name, run in found]
    form = tag(
        "form",
        tag("ul", items, class_="runs"),
        tag("p", tag("button", "Compare selected runs", type="submit", class_="primary")) if len(found) > 1 else None,
        id="runs",
        action="/compare",
        method="get",
        data_live=True,
        aria_label="Runs",
    )
    return [head, form, CHARTS], charts


def run_page(name: str, run: RunRecord) -> Page:
    sections = run_sections(run)
    link = tag(
        "p", tag("a", "Download this page as one file", href=f"/report/{quote(name)}", download=True), class_="faint"
    )
    return [*sections, link], charts_of(run)


def compare_page(runs: Sequence[tuple[str, RunRecord]]) -> Page:
    labelled = [(_shown(name, run), run) for name, run in runs]
    return compared_sections(labelled), compared_charts(labelled)


def last_written(run: RunRecord) -> float:
    """When the run logged something last; 0 if its files have no times."""
    times = (number(one.get("time")) for one in (*run.training[-1:], *run.events[-1:]))
    return max((found for found in times if found is not None), default=0.0)


def _shown(name: str, run: RunRecord) -> str:
    return run.name if name == "." else name


def _empty() -> Html:
    return section(
        "runs",
        "No runs yet",
        tag("p", "A run appears here when shoal train has started it."),
        tag("p", tag("a", "Plan one", href="/plan"), ": which model fits on which GPUs, and how fast."),
    )


def _item(name: str, run: RunRecord) -> Html:
    results = results_of(run)
    shown, identifier = _shown(name, run), f"select-{quote(name, safe='')}"
    facts = [
        ("loss", figures.decimal(results.loss)),
        ("eval loss", figures.decimal(results.eval_loss)),
        ("tokens/s", figures.compact(results.tokens_per_second)),
        ("samples/s", figures.compact(results.samples_per_second)),
        ("MFU", figures.percent(results.mfu)),
        ("left", figures.seconds(results.seconds_left))
        if results.seconds_left
        else ("updated", _ago(last_written(run))),
    ]
    progress = f"step {figures.count(run.step or 0)}" + (f" of {figures.count(run.steps)}" if run.steps else "")
    return tag(
        "li",
        tag("input", type="checkbox", name="run", value=name, id=identifier, aria_label=f"Compare {shown}"),
        tag(
            "div",
            tag("a", shown, href=f"/runs/{quote(name)}", class_="name"),
            badge(run.state),
            tag("small", progress),
            steps_bar(run),
            class_="who",
        ),
        _sparkline(run),
        tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in facts if value != figures.NONE]),
        class_="card run",
    )


def _sparkline(run: RunRecord) -> Html:
    """The loss, small."""
    lines = run.training[:: max(1, len(run.training) // POINTS)]
    losses = [value for one in lines if (value := number(one.get("loss"))) is not None]
    low, high = (min(losses), max(losses)) if losses else (0.0, 0.0)
    if len(losses) < 2 or low == high:
        return tag("svg", class_="spark", role="img", aria_label="no curve yet")
    points = " ".join(
        f"{100 * index / (len(losses) - 1):.1f},{28 - 26 * (value - low) / (high - low):.1f}"
        for index, value in enumerate(losses)
    )
    line = tag("polyline", points=points, vector_effect="non-scaling-stroke")
    return tag(
        "svg", line, class_="spark", viewBox="0 0 100 30", preserveAspectRatio="none", role="img",
        aria_label=f"loss from {losses[0]:.3f} to {losses[-1]:.3f}",
    )  # fmt: skip


def _ago(moment: float) -> str:
    if not moment:
        return figures.NONE
    return f"{figures.seconds(max(1.0, time.time() - moment)).split(' ')[0]} ago"
