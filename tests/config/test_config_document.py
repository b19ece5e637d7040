"""docs/config.md is generated from the schema, and says what is not built."""

from pathlib import Path

from shoal.config.document import document
from shoal.config.schema import every_key

PAGE = Path(__file__).parents[2] / "docs" / "config.md"


def test_the_page_of_all_keys_matches_the_schema() -> None:
    assert PAGE.read_text() == document(), "run make docs"


def test_every_key_that_holds_a_value_is_on_the_page() -> None:
    page = document()
    keys = [key for key, _ in every_key()]
    values = [key for key in keys if not any(other.startswith(f"{key}.") for other in keys)]
    assert [key for key in values if f"| `{key}` |" not in page] == []


def test_what_is_not_built_says_so() -> None:
    (row,) = [line for line in document().splitlines() if line.startswith("| `train.compile` |")]
    assert "Not all of this is built yet. Use auto" in row
