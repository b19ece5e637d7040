"""`shoal data preview` and `shoal data stats`."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.common import AsJson, ConfigCommand, print_json, print_progress

if TYPE_CHECKING:
    from shoal.data.inspect.preview_text import Piece

data_app = typer.Typer(
    help="Inspect training data, without a GPU: decoded examples, and statistics.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [KEY=VALUE]...",
        help="A config, a run's folder, or a data file or folder; and config overrides, such as data.max_length=512.",
    ),
]
STYLES = {"plain": "", "trained": "green", "heading": "bold", "rule": "cyan"}


@data_app.command("preview", cls=ConfigCommand)
def preview(
    arguments: Arguments = None,
    examples: Annotated[int, typer.Option("--examples", "-n", min=1, help="How many to show, of each source.")] = 3,
    first: Annotated[int, typer.Option("--from", min=0, metavar="INDEX", help="The first to show, from 0.")] = 0,
    draw: Annotated[bool, typer.Option("--random", help="Draw them at random from the first records.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Random seed of --random.")] = 0,
    sequences: Annotated[
        bool, typer.Option("--sequences", help="Show packed sequences, not examples; packs the first records only.")
    ] = False,
    characters: Annotated[
        int, typer.Option("--characters", min=0, help="The most to show of each document; 0: all.")
    ] = 2000,
    as_json: AsJson = False,
) -> None:
    """Show examples as the model sees them: template and special tokens included, tokens of the loss marked.

    They are green in a terminal, and between ⟦ and ⟧ elsewhere. Reads only the first records.
    """
    from shoal import api

    file, overrides = _split(arguments)
    _do_without_torch()
    found = api.data_preview(
        file,
        overrides,
        examples=examples,
        first=first,
        seed=seed if draw else None,
        sequences=sequences,
        report=print_progress,
    )
    if as_json:
        print_json(found.as_dict())
    else:
        _print_pieces(found.pieces(characters or None))


@data_app.command("stats", cls=ConfigCommand)
def stats(arguments: Arguments = None, as_json: AsJson = False) -> None:
    """Report lengths, truncation, duplicates, how well the data packs, and the steps of a run with it.

    Reads all of the data. It is tokenized into the cache, so that training with the same settings starts at once.
    """
    from shoal import api

    file, overrides = _split(arguments)
    _do_without_torch()
    found = api.data_stats(file, overrides, report=print_progress)
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


def _split(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The file, if the first argument is not an override, and the overrides."""
    given = list(arguments or [])
    if not given:
        raise typer.BadParameter("give a config, a run's folder or a data file, or data.path=FILE.")
    is_file = "=" not in given[0] or Path(given[0]).exists()
    return (Path(given[0]), given[1:]) if is_file else (None, given)


def _do_without_torch() -> None:
    """transformers imports torch if it can, also for a tokenizer, which does not need it: that would take longer than
    the whole command. None in sys.modules is Python's way to say that a module cannot be imported. This process ends
    with the command, so nothing else misses it."""
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # that there is no torch


def _print_pieces(pieces: "Iterator[Piece]") -> None:
    from rich.console import Console
    from rich.text import Text

    from shoal.data.inspect.preview_text import plain_text
    from shoal.data.inspect.spans import CLOSE, OPEN

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal or console.no_color or console.color_system is None:
        typer.echo(f"tokens of the loss are between {OPEN} and {CLOSE}\n{plain_text(pieces)}", nl=False)
        return
    console.print(Text("tokens of the loss are green"), style=STYLES["trained"])
    for text, style in pieces:
        console.print(Text(text), style=STYLES[style], end="")
