"""The terminal: parse, call, print. Whatever a command does is a function in `shoal.api`."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import __version__
from shoal.mistakes import UserMistake

DONE, FAILED, MISTAKEN, STOPPED_EARLY = 0, 1, 2, 75

app = typer.Typer(
    help="Train and fine-tune transformers on one device or many, from one YAML file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at a config before using it.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")

File = Annotated[Path, typer.Argument(metavar="FILE", help="The YAML file that describes the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the file, such as train.lr=3e-4.")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output and nothing else there.")
]


class ExportFormat(StrEnum):
    hf = "hf"


class ExportDtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def shoal(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    file: File,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    start_from: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Start from this checkpoint's folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away the run of this name.")] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restart all processes this often when one dies.")
    ] = 0,
    as_json: AsJson = False,
) -> None:
    """Train. Ctrl-C, TERM, USR1 and USR2 finish the step, save, and exit with status 75."""
    from shoal import api

    summary = api.train(
        api.load_config(file, overrides or []),
        resume=resume,
        start_from=start_from,
        overwrite=overwrite,
        max_restarts=max_restarts,
    )
    if as_json:
        _print_json(summary.as_dict())
    else:
        loss = "not a number" if summary.loss is None else f"{summary.loss:.4f}"
        typer.echo(
            f"{summary.run}: step {summary.step} of {summary.steps}, loss {loss}, checkpoint {summary.checkpoint}"
        )
    if summary.stopped == "signal":
        typer.echo(f"Stopped early; go on with: shoal train {file} {' '.join(overrides or [])} --resume", err=True)
        raise typer.Exit(STOPPED_EARLY)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/NAME.")],
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.")] = ExportFormat.hf,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: RUN/hf.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="The checkpoint's step; default: the newest.")] = None,
    dtype: Annotated[ExportDtype | None, typer.Option("--dtype", help="Default: as the weights were trained.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as a Hugging Face folder, which plain transformers loads."""
    from shoal import api

    written = api.export(run, output, step=step, dtype=dtype, report=lambda text: typer.echo(text, err=True))
    if as_json:
        _print_json({"output": str(written), "format": to.value})
    else:
        typer.echo(str(written))


@config_app.command("show")
def config_show(file: File, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the resolved config: every key, with defaults, includes and overrides applied."""
    from shoal import api

    config = api.load_config(file, overrides or [])
    if as_json:
        _print_json(config.model_dump(mode="json", by_alias=True))
    else:
        typer.echo(api.config_to_yaml(config), nl=False)


@config_app.command("schema")
def config_schema(as_json: AsJson = False) -> None:
    """Print the JSON Schema of the config, for editors and other programs. It is JSON with or without --json."""
    from shoal import api

    _print_json(api.json_schema())


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2))


def main() -> None:
    """The `shoal` command. A mistake is one sentence and status 2; a failed run is status 1."""
    try:
        app()
    except UserMistake as mistake:
        typer.echo(f"shoal: {mistake}", err=True)
        sys.exit(MISTAKEN)
    except Exception as error:
        # Imported by now, if it can have been raised at all; importing it for `--help` would cost seconds.
        if type(error).__name__ in ("Diverged", "RunFailed"):
            typer.echo(f"shoal: {error}", err=True)
            sys.exit(FAILED)
        raise
