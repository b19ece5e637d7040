"""Measured figures in README.md and docs/ are those of the committed results."""

import pytest

from benchmarks.figures.pages import PAGES
from benchmarks.measured import ROOT, refreshed


@pytest.mark.parametrize("name", PAGES)
def test_the_figures_of_a_page_are_those_of_its_results(name: str) -> None:
    text = (ROOT / name).read_text()
    assert refreshed(text, PAGES[name]()) == text, "run python -m benchmarks.measured"


def test_figures_are_written_where_the_words_are() -> None:
    text = "In all, 5 of\n7 fish (3.0%)."
    assert refreshed(text, [("{} of {} fish ({}%)", ["6", "1,000", "0.6"])]) == "In all, 6 of\n1,000 fish (0.6%)."


@pytest.mark.parametrize("text", ["no fish", "1 fish, 2 fish"])
def test_words_that_are_not_there_once_are_an_error(text: str) -> None:
    with pytest.raises(SystemExit, match="not one"):
        refreshed(text, [("{} fish", ["1"])])
