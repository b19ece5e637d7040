"""`shoal plan`."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import ANSWER_IS_NO, AsJson, print_json

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="The YAML file and overrides, or overrides alone."),
]


def plan_command(
    arguments: Arguments = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="F", help="Also plot it to a .png, .svg or .pdf file.")
    ] = None,
    system: Annotated[
        str,
        typer.Option(
            "--like",
            metavar="SYSTEM[@YEAR-MONTH]",
            help="Forecast for another system's implementation, such as torchtitan, with today's libraries or those of "
            "a month.",
        ),
    ] = "shoal",
    traits: Annotated[
        list[str] | None,
        typer.Option(
            "--trait",
            metavar="NAME=VALUE",
            help="An option of that system that no key of ours is for, such as overlaps_gradients=true; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Forecast whether a run fits in memory, how fast it is, and what would change that. Does not fit: status 3."""
    from shoal import api

    given = list(arguments or [])
    file = Path(given.pop(0)) if given and "=" not in given[0] else None
    plan = api.plan(api.load_config(file, given, planned=True), system=system, traits=traits or ())
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
