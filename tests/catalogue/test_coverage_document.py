"""docs/coverage.md names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_row_of_the_coverage_names_tests_that_exist() -> None:
    page = (ROOT / "docs" / "coverage.md").read_text()
    rows = [row for row in page.splitlines() if row.startswith("| ") and re.search(r"\| (works|refused) \|", row)]
    assert len(rows) == page.count("| works |") + page.count("| refused |") > 20
    for row in rows:
        named = NAMED.findall(row)
        assert named, row
        assert len(named) == row.count("::"), row
        for file, test in named:
            assert f"\ndef {test}(" in (ROOT / file).read_text(), f"{file} has no {test}"
