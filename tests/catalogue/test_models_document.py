"""docs/models.md is generated from the tables of model types."""

from pathlib import Path

from shoal.catalogue.document import document

PAGE = Path(__file__).parents[2] / "docs" / "models.md"


def test_the_page_of_models_matches_the_tables() -> None:
    assert PAGE.read_text() == document(), "run make docs"
