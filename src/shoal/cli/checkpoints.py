"""`shoal checkpoints RUN` and `shoal checkpoints verify RUN`."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import ANSWER_IS_NO, AsJson, print_json, print_progress


def checkpoints(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[verify] RUN", help="The run's folder, such as runs/NAME; verify: check all hashes."),
    ],
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints with step, size and state. `verify` also compares every file with its hash, and exits
    with status 3 if one differs."""
    from shoal import api

    *verb, run = words
    if verb not in ([], ["verify"]):
        raise typer.BadParameter("give a run's folder, or verify and a run's folder.")
    verify = bool(verb)
    found = api.checkpoints(Path(run), verify=verify, report=print_progress)
    if as_json:
        print_json({"run": run, "checkpoints": [one.as_dict() for one in found]})
    elif found:
        typer.echo("\n".join(one.text() for one in found))
    else:
        typer.echo(f"{run} has no checkpoints yet.")
    if verify and any(one.state != "whole" for one in found):
        raise typer.Exit(ANSWER_IS_NO)
