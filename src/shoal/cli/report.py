"""`shoal report` and `shoal ui`: pages about runs."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, print_json, print_progress


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, such as runs/NAME.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="FILE", help="The page; default: report.html, in the run's folder if there is one run."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write one self-contained HTML page about a run, or one that compares several."""
    from shoal import api

    written = api.report(runs, output)
    if as_json:
        print_json(written.as_dict())
    else:
        typer.echo(f"report      {written.path}")


def ui(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="The folder whose runs are shown; default: runs.")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port on 127.0.0.1; the next free one if it is taken.")
    ] = 8710,
) -> None:
    """Show the runs below a folder, and the planner, in a browser on this machine. Ctrl-C ends it."""
    from shoal.ui.serve import serve

    serve(folder, port=port, say=print_progress)
