"""The site: it builds without a warning, asks no other server for anything, and fits on a phone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.page_blocks import ROOT

PHONE = {"width": 390, "height": 800}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material", reason="pip install 'shoal[docs]'")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_the_site_builds_strictly_and_names_no_other_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text()
        for attribute in ('src="http', 'src="//', 'rel="stylesheet" href="http', 'rel="preconnect"'):
            assert attribute not in text, f"{page.name}: {attribute}"
    assert all("url(http" not in sheet.read_text() for sheet in site.rglob("*.css"))


@pytest.mark.long
@pytest.mark.slow
def test_every_page_fits_on_a_phone_in_both_themes_and_search_works(site: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no Chromium; .ci/run installs it")
    playwright = pytest.importorskip("playwright.sync_api")
    wide, asked, schemes = [], [], []
    with playwright.sync_playwright() as started:
        options = ["--no-sandbox", "--allow-file-access-from-files"]
        browser = started.chromium.launch(executable_path=chromium, args=options)
        for theme in ("light", "dark"):
            page = browser.new_page(viewport=PHONE, color_scheme=theme)
            page.on("request", lambda request: asked.append(request.url))
            # The theme is the same on every page: the second one is looked at on one page only.
            for file in sorted(site.rglob("*.html")) if theme == "light" else [site / "index.html"]:
                page.goto(file.as_uri(), wait_until="domcontentloaded")
                if page.evaluate("document.documentElement.scrollWidth") > PHONE["width"]:
                    wide.append(file.name)
            schemes.append(page.evaluate("document.body.getAttribute('data-md-color-scheme')"))
        # As a reader does who opened the page from the disk: nothing is served.
        page = browser.new_page()
        page.goto((site / "index.html").as_uri())
        page.click("input.md-search__input")
        page.keyboard.type("checkpoint")
        page.wait_for_selector(".md-search-result__item")
        browser.close()
    assert wide == []
    assert schemes == ["default", "slate"]
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
