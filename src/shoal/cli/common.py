"""What the commands have in common."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

DONE, FAILED, MISTAKEN, ANSWER_IS_NO, STOPPED_EARLY = 0, 1, 2, 3, 75

File = Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file that describes the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the file, such as train.lr=3e-4.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")
]


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))
