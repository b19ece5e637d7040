"""Arguments, exit statuses and output shared by the commands."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shoal.config.foreign_keys import our_key
from shoal.config.schema import every_key
from shoal.mistakes import UserMistake

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


class ConfigCommand(TyperCommand):
    """A command that takes config overrides: the options of other tools are answered with the override."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        known = {name for parameter in self.params for name in parameter.opts}
        for index, argument in enumerate(args):
            option, equals, value = argument.partition("=")
            if not option.startswith("--") or option in (*known, "--", "--help"):
                continue
            if option in ("--config", "--config_file", "--config-file"):
                raise UserMistake(f"{option} is not an option: the file is an argument, shoal {self.name} FILE.")
            if (ours := our_key(option[2:].split("."))) is not None:
                raise UserMistake(f"{option} is not an option of shoal {self.name}: {ours}. Add {ours.key}=VALUE.")
            if "." in option or option[2:] in {key for key, _ in every_key()}:
                following = args[index + 1 : index + 2]
                value = value if equals else following[0] if following and not following[0].startswith("-") else "VALUE"
                raise UserMistake(
                    f"{option} is not an option: overrides have no dashes; write {option[2:]}={value or 'VALUE'}."
                )
        return super().parse_args(ctx, args)


class WeightDtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def print_progress(text: str) -> None:
    """Progress goes to standard error, so that standard output holds only the result."""
    typer.echo(text, err=True)
