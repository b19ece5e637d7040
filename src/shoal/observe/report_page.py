"""`report.html`: one page with everything in it, which loads nothing and sends nothing."""

import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from shoal.files import write_atomically
from shoal.observe.charts import charts_of, compared_charts
from shoal.observe.html import Html, tag
from shoal.observe.report import run_sections
from shoal.observe.report_compare import compared_sections, labels_of
from shoal.observe.run_reader import RunRecord

REPORT = "report.html"
# The browser refuses everything else, so that a page which is sent to somebody cannot fetch anything.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 32 32'%3E"
    "%3Crect width='32' height='32' rx='8' fill='%230b7285'/%3E"
    "%3Cpath d='M7 11h9M12 16h12M7 21h9' stroke='white' stroke-width='3' stroke-linecap='round'/%3E%3C/svg%3E"
)


@cache
def asset(name: str) -> str:
    """A file of `pages/`."""
    return (files("shoal.observe") / "pages" / name).read_text(encoding="utf-8")


def run_report(run: RunRecord) -> str:
    """The page of one run."""
    return page(run.name, run_sections(run), charts_of(run))


def comparison(runs: Sequence[RunRecord]) -> str:
    """The page that compares runs."""
    labelled = labels_of(runs)
    title = " · ".join(label for label, _ in labelled)
    return page(title, compared_sections(labelled), compared_charts(labelled))


def write_report(run: RunRecord) -> None:
    """Write or replace `report.html` in the run's folder."""
    write_atomically(run.path / REPORT, run_report(run))


def page(title: str, sections: Sequence[Html], charts: list[dict[str, Any]]) -> str:
    """A complete page, with its styles, scripts and data inside."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · shoal"),
        tag("link", rel="icon", href=ICON),
        tag("style", Html(asset("uPlot.min.css") + asset("page.css"))),
    )
    body = tag(
        "body",
        tag("main", list(sections), id="page"),
        tag("footer", "shoal report"),
        tag("script", embedded(charts), type="application/json", id="chart-data"),
        tag("script", Html(asset("uPlot.iife.min.js"))),
        tag("script", Html(asset("charts.js"))),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def embedded(value: Any) -> Html:
    """JSON inside a script element, which only `</script` or `<!--` could end."""
    return Html(json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))
