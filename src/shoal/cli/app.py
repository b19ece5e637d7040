"""The `shoal` command. Commands parse, call a function of `shoal.api`, and print; each group has its own file.

No file here imports torch at the top level, so that `--help` and config errors are immediate.
"""

import errno
import os
import sys
from typing import Annotated

import typer

from shoal import __version__
from shoal.cli.bench import bench_app
from shoal.cli.checkpoints import checkpoints
from shoal.cli.common import FAILED, MISTAKEN, ConfigCommand
from shoal.cli.config import config_app
from shoal.cli.convert import ImportCommand, export_command, import_command, merge_command
from shoal.cli.data import data_app
from shoal.cli.doctor import doctor
from shoal.cli.encoders import embed, predict
from shoal.cli.evaluate import evaluate
from shoal.cli.jobs import cancel, logs, status
from shoal.cli.plan import plan_command
from shoal.cli.report import report, ui
from shoal.cli.submit import submit_command
from shoal.cli.sweep import sweep
from shoal.cli.top import top
from shoal.cli.train import TrainCommand, download, init, train
from shoal.cli.usage import OneSentence
from shoal.cli.use import chat, generate
from shoal.crash import report_crash
from shoal.launch.environment import BY_HAND, TORCHRUN, read_placement
from shoal.launch.torchrun import ends_again, is_new
from shoal.mistakes import RunFailed, UserMistake

app = typer.Typer(
    cls=OneSentence,
    help="Train and fine-tune transformers on one device or many, from one YAML file.",
    epilog="Begin with: shoal init chess-tiny, shoal plan chess-tiny.yaml, shoal train chess-tiny.yaml.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
app.add_typer(bench_app, name="bench")
# In the order of a run's life, which is that of `shoal --help`.
app.command("init")(init)
app.command("download")(download)
app.command("plan", cls=ConfigCommand)(plan_command)
app.command("doctor")(doctor)
app.command("train", cls=TrainCommand)(train)
app.command("submit", cls=ConfigCommand)(submit_command)
app.command("sweep", cls=ConfigCommand)(sweep)
app.command("status")(status)
app.command("top")(top)
app.command("logs")(logs)
app.command("cancel")(cancel)
app.command("report")(report)
app.command("ui")(ui)
app.command("checkpoints")(checkpoints)
app.command("generate")(generate)
app.command("chat")(chat)
app.command("eval")(evaluate)
app.command("embed")(embed)
app.command("predict")(predict)
app.command("export")(export_command)
app.command("merge")(merge_command)
app.command("import", cls=ImportCommand)(import_command)


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


def another_says_it() -> bool:
    """Whether the first process of this node says this mistake too: before ranks meet, all that srun or mpirun has
    started there find the same ones. Ranks of torchrun have their own way."""
    try:
        place = read_placement(os.environ)
    except UserMistake:
        return False
    together = place is not None and place.started_by not in (TORCHRUN, BY_HAND) and place.local_rank > 0
    return together and "torch" not in sys.modules


def main() -> None:
    """Run the command. A user mistake prints one sentence and exits with status 2; a failed run, and an error that
    nobody expected, with 1."""
    try:
        if ends_again(os.environ):
            sys.exit(MISTAKEN)
        app()
    except UserMistake as mistake:
        if is_new(str(mistake), os.environ) and not another_says_it():
            typer.echo(f"shoal: {mistake}", err=True)
        sys.exit(MISTAKEN)
    except RunFailed as failure:
        typer.echo(f"shoal: {failure}", err=True)
        sys.exit(FAILED)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):  # nothing to report
            where = error.filename or "A file or standard output"
            typer.echo(f"shoal: {where} cannot be written: {error.strerror}.", err=True)
        else:
            typer.echo(f"shoal: {report_crash(error)}", err=True)
        sys.exit(FAILED)
