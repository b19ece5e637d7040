"""The server of `shoal ui`. Every page is complete when it is loaded; scripts then ask for what has changed."""

from collections.abc import Callable, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from shoal.observe.html import Html, section, tag
from shoal.observe.report_page import asset, embedded, run_report
from shoal.observe.run_reader import RunRecord
from shoal.ui.folder import RunsFolder
from shoal.ui.guard import Guard
from shoal.ui.planner import form, planned
from shoal.ui.runs import Page, compare_page, list_page, run_page

# What /static serves: names, not paths.
SHARED = {"uPlot.iife.min.js": "text/javascript", "uPlot.min.css": "text/css", "charts.js": "text/javascript",
          "page.css": "text/css"}  # fmt: skip
OWN = {"live.js": "text/javascript", "planner.js": "text/javascript", "ui.css": "text/css", "icon.svg": "image/svg+xml"}
MOST_COMPARED = 8


def make_app(folder: Path, port: int) -> Starlette:
    """The application that shows the runs below `folder` to browsers of this machine."""
    runs = RunsFolder(folder)
    pages = Pages(runs)
    routes = [
        Route("/", pages.page(pages.runs, "Runs", "/api/runs")),
        Route("/runs/{name:path}", pages.page(pages.run, None, None)),
        Route("/compare", pages.page(pages.compare, "Compared runs", None)),
        Route("/plan", pages.planner),
        Route("/api/runs", pages.data(pages.runs)),
        Route("/api/runs/{name:path}", pages.data(pages.run)),
        Route("/api/compare", pages.data(pages.compare)),
        Route("/api/plan", pages.plan_data),
        Route("/report/{name:path}", pages.report),
        Route("/static/{name}", static),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, port=port)],
        exception_handlers={404: missing, 500: failed},
    )
    app.state.runs = runs
    return app


class Pages:
    """The answers to requests, from the files of one folder."""

    def __init__(self, folder: RunsFolder) -> None:
        self.folder = folder

    def page(self, make: "Maker", title: str | None, source: str | None) -> Callable[[Request], Any]:
        """An endpoint for a whole page; its scripts ask for `source`, by default the page's own address below /api."""

        async def answer(request: Request) -> Response:
            stamp, made = await run_in_threadpool(make, request, None)
            assert made is not None
            sections, charts = made
            query = f"?{request.url.query}" if request.url.query else ""
            asked = source or f"/api{request.url.path}{query}"
            name = title or request.path_params["name"]
            return HTMLResponse(shell(name, sections, charts, source=asked, stamp=stamp))

        return answer

    def data(self, make: "Maker") -> Callable[[Request], Any]:
        """An endpoint for what has changed since the stamp that the page knows: nothing is status 204."""

        async def answer(request: Request) -> Response:
            stamp, made = await run_in_threadpool(make, request, request.headers.get("x-known"))
            if made is None:
                return Response(status_code=204)
            sections, charts = made
            return JSONResponse({"stamp": stamp, "sections": [str(one) for one in sections if one], "charts": charts})

        return answer

    def runs(self, request: Request, known: str | None) -> tuple[str, Page | None]:
        names = self.folder.names()
        stamp = " ".join(str(self.folder.stamp(name)) for name in names) or "none"
        return stamp, None if stamp == known else list_page(self.folder, names)

    def run(self, request: Request, known: str | None) -> tuple[str, Page | None]:
        name = request.path_params["name"]
        stamp = self.folder.stamp(name)
        if stamp is None or stamp == known:
            return self._unchanged(stamp, name)
        return stamp, run_page(name, self._read(name))

    def compare(self, request: Request, known: str | None) -> tuple[str, Page | None]:
        names = list(dict.fromkeys(request.query_params.getlist("run")))[:MOST_COMPARED]
        if not names:
            return "none", ([_nothing_selected()], [])
        stamp = " ".join(str(self.folder.stamp(name)) for name in names)
        if stamp == known:
            return stamp, None
        return stamp, compare_page([(name, self._read(name)) for name in names])

    def _unchanged(self, stamp: str | None, name: str) -> tuple[str, None]:
        if stamp is None:
            raise HTTPException(404, f"There is no run {name} below {self.folder.given}.")
        return stamp, None

    def _read(self, name: str) -> RunRecord:
        found = self.folder.read(name)
        if found is None:
            raise HTTPException(404, f"There is no run {name} below {self.folder.given}.")
        return found

    async def report(self, request: Request) -> Response:
        """A run's report as one file. As a download: the browser would not run the scripts inside it here."""
        run = await run_in_threadpool(self._read, request.path_params["name"])
        content = await run_in_threadpool(run_report, run)
        return HTMLResponse(content, headers={"content-disposition": 'attachment; filename="report.html"'})

    async def planner(self, request: Request) -> Response:
        given = dict(request.query_params)
        results = await run_in_threadpool(planned, given)
        title = tag("header", tag("div", tag("h1", "Planner"), class_="title"), tag("p", SUBTITLE, class_="subtitle"))
        body = [title, tag("div", form(given), tag("div", results, id="results"), class_="planner")]
        return HTMLResponse(shell("Planner", body, [], script="planner.js"))

    async def plan_data(self, request: Request) -> Response:
        sections = await run_in_threadpool(planned, dict(request.query_params))
        return JSONResponse({"sections": [str(one) for one in sections if one]})


Maker = Callable[[Request, str | None], tuple[str, Page | None]]
SUBTITLE = "What fits on which GPUs, and how fast: the forecast of shoal plan."


def shell(
    title: str,
    sections: Sequence[Html],
    charts: list[dict[str, Any]],
    *,
    source: str | None = None,
    stamp: str | None = None,
    script: str = "live.js",
) -> str:
    """A complete page. All it loads comes from /static."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} · shoal"),
        tag("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        [tag("link", rel="stylesheet", href=f"/static/{name}") for name in ("uPlot.min.css", "page.css", "ui.css")],
    )
    planning = script == "planner.js"
    navigation = tag(
        "nav",
        tag("a", "shoal", href="/", class_="brand"),
        tag("a", "Runs", href="/", aria_current=None if planning else "page"),
        tag("a", "Planner", href="/plan", aria_current="page" if planning else None),
        tag("span", id="connection", role="status"),
        aria_label="Pages",
    )
    body = tag(
        "body",
        tag("a", "Skip to content", href="#page", class_="skip"),
        navigation,
        tag("main", list(sections), id="page", tabindex="-1"),
        tag("script", embedded(charts), type="application/json", id="chart-data"),
        [tag("script", src=f"/static/{name}") for name in ("uPlot.iife.min.js", "charts.js", script)],
        data_source=source,
        data_stamp=stamp,
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _nothing_selected() -> Html:
    return section("empty", "No runs are selected", tag("p", "Tick runs in the ", tag("a", "list", href="/"), "."))


async def static(request: Request) -> Response:
    name = request.path_params["name"]
    if name in SHARED:
        return Response(asset(name), media_type=SHARED[name])
    if name in OWN:
        content = (files("shoal.ui") / "static" / name).read_text(encoding="utf-8")
        return Response(content, media_type=OWN[name])
    raise HTTPException(404)


async def missing(request: Request, error: Exception) -> Response:
    detail = getattr(error, "detail", "")
    words = detail if detail and detail != "Not Found" else "There is no such page."
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": words}, 404)
    back = tag("p", tag("a", "All runs", href="/"))
    return HTMLResponse(shell("Not found", [section("missing", "Not found", tag("p", words), back)], []), 404)


async def failed(request: Request, error: Exception) -> Response:
    return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
