"""Arguments, exit statuses and output shared by the commands."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

DONE, FAILED, MISTAKEN, ANSWER_IS_NO, STOPPED_EARLY = 0, 1, 2, 3, 75

File = Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file that describes the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config overrides, such as train.lr=3e-4.")
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/NAME.")]
Step = Annotated[int | None, typer.Option("--step", help="The checkpoint's step; default: the newest.")]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")
]


class WeightDtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_progress(text: str) -> None:
    """Progress goes to standard error, so that standard output holds only the result."""
    typer.echo(text, err=True)
