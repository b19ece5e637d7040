"""The pictures of docs/pictures are what their scripts draw, and can be read in both themes."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.pictures.__main__ import FOLDER, PICTURES
from benchmarks.pictures.pipeline import STAGES, idle_share, schedule
from benchmarks.pictures.svg import COLOURS
from shoal.plan.run.stages import bubble_share

DOCS = FOLDER.parent
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_what_its_script_draws(name):
    assert (FOLDER / f"{name}.svg").read_text() == PICTURES[name](), "run python -m benchmarks.pictures"


def test_every_picture_is_on_a_page_with_words_for_those_who_cannot_see_it():
    shown = {}
    for page in DOCS.rglob("*.md"):
        for words, path in re.findall(r"!\[([^\]]*)\]\(([^)]*pictures/[^)]*\.svg)\)", page.read_text()):
            assert (page.parent / path).is_file(), f"{page}: {path}"
            shown[Path(path).stem] = words
    assert shown.keys() == PICTURES.keys()
    assert all(len(words) > 40 for words in shown.values()), shown


@pytest.mark.parametrize("micro_batches", [1, 4, 8, 16, 31])
@pytest.mark.parametrize("stages", [2, STAGES, 8])
def test_the_bubble_that_is_drawn_is_the_one_that_the_plan_counts(stages, micro_batches):
    assert idle_share(schedule(stages, micro_batches), stages) == pytest.approx(bubble_share(stages, micro_batches))


def luminance(colour: str) -> float:
    """As WCAG defines it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1])
def test_labels_are_readable_on_every_colour_of_both_themes(theme):
    ink = luminance(COLOURS["ink"][theme])
    for name in COLOURS.keys() - {"ink", "faint", "line", "accent", "wrong"}:
        lighter, darker = sorted((ink, luminance(COLOURS[name][theme])), reverse=True)
        assert (lighter + 0.05) / (darker + 0.05) > 4.5, name


def test_pictures_load_nothing_and_run_nothing():
    for path in FOLDER.glob("*.svg"):
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse(path).iter()}
        assert tags <= {"svg", "title", "desc", "style", "defs", "marker", "rect", "path", "text"}
        assert "http" not in path.read_text().replace("http://www.w3.org/2000/svg", "")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="there is no playwright: pip install playwright")
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield opened
        opened.close()


OVERLAPS = """() => {
  const box = element => element.getBoundingClientRect();
  const all = box(document.documentElement);
  const texts = [...document.querySelectorAll('text')].map(element => [element.textContent, box(element)]);
  const outside = texts.filter(([, one]) => one.left < 0 || one.right > all.width || one.bottom > all.height);
  const over = texts.flatMap(([words, one], index) => texts.slice(index + 1).filter(([, other]) =>
    Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 3).map(([others]) => words + ' / ' + others));
  const paper = getComputedStyle(document.querySelector('.paper')).fill;
  return {outside: outside.map(([words]) => words), over, paper};
}"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium")
def test_no_label_leaves_its_picture_or_covers_another_and_the_theme_is_the_readers(browser):
    papers = set()
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme, viewport={"width": 800, "height": 800})
        for path in sorted(FOLDER.glob("*.svg")):
            page.goto(path.as_uri())
            found = page.evaluate(OVERLAPS)
            assert (found["outside"], found["over"]) == ([], []), path.name
            papers.add((scheme, found["paper"]))
    assert len(papers) == 2
