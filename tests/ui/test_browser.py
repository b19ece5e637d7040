"""The pages in a real browser: Debian's Chromium, headless, driven by Playwright."""

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import api
from shoal.observe import figures
from tests.observe.written_runs import append, event, training_line, write_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]
# To look at them, set it to a folder.
SCREENSHOTS = os.environ.get("SHOAL_SCREENSHOTS")
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 900}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: pip install playwright")
    with playwright.sync_playwright() as started:
        # Chromium's own sandbox needs privileges that containers withhold; only our pages are opened.
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("browser") / "runs"
    write_run(runs / "first")
    write_run(runs / "second", lr=3e-4, done=40)
    write_run(runs / "live", state=None)
    return runs


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[str]:
    import uvicorn

    from shoal.ui.app import make_app
    from shoal.ui.serve import listen

    with listen(0, lambda _: None) as opened:
        port = opened.getsockname()[1]
        running = uvicorn.Server(uvicorn.Config(make_app(folder, port), log_level="warning", lifespan="off"))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [opened]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{port}"
        running.should_exit = True
        thread.join(timeout=10)


class Watched:
    """A page whose errors and requests are recorded."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport=DESKTOP, **options)
        self.page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def shows(self, selector: str, text: str) -> None:
        """Wait until an element shows a text."""
        self.page.locator(selector, has_text=text).wait_for(timeout=10_000)

    def picture(self, name: str) -> None:
        if SCREENSHOTS:
            self.page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    found = Watched(browser)
    yield found
    assert found.errors == []
    found.context.close()


def test_moving_a_control_changes_the_numbers_and_the_config(watched: Watched, server: str) -> None:
    page = watched.page
    page.goto(f"{server}/plan")
    settings = [f"{key}={value}" for key, value in (
        ("model.shape", "llama3-8b"), ("hardware.gpu", "h100-80gb"), ("hardware.devices", 8),
        ("data.max_length", 16384), ("train.global_batch", 64), ("train.recompute", "auto"),
        ("train.tokens", 1_000_000_000),
    )]  # fmt: skip
    plan = api.plan(api.load_config(None, settings, planned=True)).as_dict()
    before = page.locator('[data-figure="memory"] p').first.inner_text()
    assert figures.gib(plan["memory"]["reserved_gib"]) not in before, "there is nothing to wait for"
    page.get_by_label("Sequence length").fill("16384")
    watched.shows('[data-figure="memory"] p', figures.gib(plan["memory"]["reserved_gib"]))
    assert "max_length: 16384" in page.locator("#yaml code").inner_text()
    page.reload()  # the address has the controls
    assert page.get_by_label("Sequence length").input_value() == "16384"
    page.get_by_label("Sequence length").fill("4097000")
    page.wait_for_selector("#verdict .problem, #verdict .bad")


def test_the_planner_works_by_keyboard(watched: Watched, server: str) -> None:
    page = watched.page
    page.goto(f"{server}/plan")
    names = []
    for _ in range(8):
        page.keyboard.press("Tab")
        names.append(page.evaluate("document.activeElement.innerText || document.activeElement.name"))
    assert names[:4] == ["Skip to content", "shoal", "Runs", "Planner"]
    assert names[4].startswith("model.shape") or "llama" in names[4]
    page.get_by_label("GPU", exact=True).focus()
    page.keyboard.type("h200")
    watched.shows("#verdict", "h200")


def test_a_live_run_advances_while_one_watches(watched: Watched, server: str, folder: Path) -> None:
    page = watched.page
    page.goto(f"{server}/runs/live")
    assert "step 50 of 100" in page.locator("#headline").inner_text()
    page.locator("summary", has_text="config.yaml").click()
    append(folder / "live" / "metrics.jsonl", training_line(60, loss=1.2345))
    append(folder / "live" / "events.jsonl", event("warning", 60, text="the GPU is hot"))
    page.wait_for_selector("text=step 60 of 100")
    assert "1.2345" in page.locator("#figures").inner_text()
    assert "the GPU is hot" in page.locator("#events").inner_text()
    assert "after 60 steps" in page.locator("#chart-loss canvas").get_attribute("aria-label")
    assert page.locator("details#config").get_attribute("open") is not None  # what was opened stays open


def test_runs_are_ticked_and_compared(watched: Watched, server: str) -> None:
    page = watched.page
    page.goto(server)
    page.get_by_label("Compare first").check()
    page.get_by_label("Compare second").check()
    page.get_by_role("button", name="Compare selected runs").click()
    page.wait_for_url("**/compare**")
    assert "train.lr" in page.locator("#differences").inner_text()
    assert page.locator("#chart-loss .u-series").count() == 3  # steps and two runs
    page.get_by_role("button", name="tokens", exact=True).click()
    assert page.locator("#chart-loss .u-series").first.inner_text().startswith("tokens")


def test_the_report_opens_from_disk_and_asks_for_nothing(watched: Watched, folder: Path) -> None:
    address = Path(api.report([folder / "first"]).path).absolute().as_uri()
    watched.page.goto(address)
    assert watched.page.locator(".chart canvas").count() >= 7
    assert "3.5000" in watched.page.locator("#figures").inner_text()
    assert watched.requests == [address]


PAGES = {"runs": "/", "run": "/runs/first", "compare": "/compare?run=first&run=second", "plan": "/plan"}


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_fit_a_phone_and_a_desktop_in_both_themes(browser: Any, server: str, name: str, scheme: str) -> None:
    watched = Watched(browser, color_scheme=scheme)
    watched.page.goto(server + PAGES[name])
    for size, viewport in (("desktop", DESKTOP), ("phone", PHONE)):
        watched.page.set_viewport_size(viewport)
        watched.page.wait_for_timeout(250)  # charts take the new width a moment later
        assert watched.page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
        wider = "[...document.querySelectorAll('.chart')].filter((one) => one.querySelector('.u-wrap').offsetWidth > "
        assert watched.page.evaluate(f"{wider} one.clientWidth).map((one) => one.id)") == []
        watched.picture(f"{name}-{scheme}-{size}")
    brightness = watched.page.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => +a + +b, 0)"
    )
    assert (brightness > 384) == (scheme == "light")
    assert all(one.startswith(server) for one in watched.requests)
    assert watched.errors == []
    watched.context.close()
