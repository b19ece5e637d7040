"""The forecasts in docs/howto and docs/concepts are those of today's plan."""

import pytest

from benchmarks.pages import OTHERS, TABLE, pages, refreshed, table

TABLES = [(page, name) for page in pages() for _, name in TABLE.findall(page.read_text())]


@pytest.mark.parametrize(("page", "name"), TABLES, ids=[name for _, name in TABLES])
def test_a_table_is_what_the_plan_says(page, name):
    written = TABLE.search(page.read_text(), page.read_text().index(f"<!-- begin: {name} -->"))
    assert written is not None
    assert written[0] == f"<!-- begin: {name} -->\n{table(name)}", "run python -m benchmarks.pages"


@pytest.mark.parametrize("page", OTHERS, ids=lambda page: page.stem)
def test_forecasts_of_other_pages_are_what_is_printed(page):
    text = page.read_text()
    assert refreshed(text) == text, "run python -m benchmarks.pages"
