"""`shoal plan`: parse, call, print, as in `cli.py`."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import ANSWER_IS_NO, AsJson, print_json

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="The YAML file, and changes to it; or changes alone."),
]


def plan_command(
    arguments: Arguments = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="F", help="Draw it: a .png, .svg or .pdf.")] = None,
    system: Annotated[
        str, typer.Option("--like", metavar="SYSTEM", help="As another system's code would do it, such as torchtitan.")
    ] = "shoal",
    as_json: AsJson = False,
) -> None:
    """Will it fit, how fast will it be, what would change that: before anyone queues. Does not fit: status 3."""
    from shoal import api

    given = list(arguments or [])
    file = Path(given.pop(0)) if given and "=" not in given[0] else None
    plan = api.plan(api.load_config(file, given, planned=True), system=system)
    if plot is not None:
        from shoal.plan.plot import plot_plan

        plot_plan(plan, plot)
    if as_json:
        print_json(plan.as_dict())
    else:
        from shoal.plan.render import plan_text

        typer.echo(plan_text(plan))
    if not plan.fits:
        raise typer.Exit(ANSWER_IS_NO)
