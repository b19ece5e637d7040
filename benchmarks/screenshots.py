"""Take the pictures of docs/images: `python benchmarks/screenshots.py RUNS`, with the runs to compare.

Needs Chromium and playwright.
"""

import shutil
import sys
import threading
from pathlib import Path

import uvicorn
from playwright.sync_api import sync_playwright

from shoal.ui.app import make_app
from shoal.ui.serve import listen

IMAGES = Path(__file__).parent.parent / "docs" / "images"


def main() -> None:
    runs = Path(sys.argv[1])
    names = [path.parent.name for path in sorted(runs.glob("*/config.yaml"))]
    pages = {"planner": "/plan", "compare": "/compare?" + "&".join(f"run={name}" for name in names)}
    with listen(0, print) as opened, sync_playwright() as playwright:
        address = f"http://127.0.0.1:{opened.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(make_app(runs, opened.getsockname()[1]), log_level="warning"))
        threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for scheme, (name, path) in zip(("light", "dark"), pages.items(), strict=True):
            page = browser.new_page(viewport={"width": 1200, "height": 820}, color_scheme=scheme)
            page.goto(address + path)
            page.wait_for_timeout(500)
            IMAGES.mkdir(exist_ok=True)
            page.screenshot(path=IMAGES / f"{name}.png")
        browser.close()
        server.should_exit = True


if __name__ == "__main__":
    main()
