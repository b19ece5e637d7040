"""Recipes: runnable config files that ship with the package, one per use case."""

from pathlib import Path

from shoal.mistakes import UserMistake, suggestion

FOLDER = Path(__file__).parent.parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def read_recipe(name: str) -> str:
    """The commented YAML of the recipe called `name`."""
    known = recipe_names()
    if name not in known:
        raise UserMistake(f"No recipe is called {name}.{suggestion(name, known)} There are {', '.join(known)}.")
    return (FOLDER / f"{name}.yaml").read_text()


def about_recipe(name: str) -> str:
    """The first line of the recipe: what it does."""
    return read_recipe(name).splitlines()[0].lstrip("# ")
