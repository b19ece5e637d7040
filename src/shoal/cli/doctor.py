"""`shoal doctor`."""

import os
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import ANSWER_IS_NO, AsJson, print_json, print_progress
from shoal.mistakes import UserMistake

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[FILE] [KEY=VALUE]...", help="The YAML file of a run to check this machine for."),
]


def doctor(
    arguments: Arguments = None,
    devices: Annotated[
        int | None,
        typer.Option("--devices", min=1, help="Start so many processes and measure the link between them."),
    ] = None,
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="The folder for runs, in place of run_dir.")
    ] = None,
    reach: Annotated[
        list[str] | None,
        typer.Option("--reach", metavar="HOST:PORT", help="An address that must answer; may be repeated."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="RUN", help="Print what to paste into an issue about this run, no secrets."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this machine: versions, GPUs, limits, disk, network. A failure: status 3.

    With a FILE also its run directory and devices. With several devices, or under torchrun or srun, the processes meet,
    and an all-reduce is compared with what the plan expects of the link.
    """
    from shoal import api

    given = list(arguments or [])
    if report is not None:
        if given or devices is not None or reach:
            raise UserMistake("--report describes a run that exists; leave out FILE, --devices and --reach.")
        text = api.doctor_report(report)
        print_json({"report": text}) if as_json else typer.echo(text)
        return
    if given and "=" in given[0] and not Path(given[0]).exists():
        raise UserMistake(f"{given[0]} is an override, but a config file comes first: shoal doctor run.yaml {given[0]}")
    config = api.load_config(Path(given[0]), given[1:]) if given else None
    found = api.doctor(
        config,
        runs=runs,
        devices=devices,
        reach=reach or (),
        show=lambda finding: None if as_json else typer.echo(finding.text()),
        say=print_progress,
    )
    if as_json and found.findings and _is_first():
        print_json(found.as_dict())
    elif _is_first():
        typer.echo(f"\n{found.summary()}")
    if not found.healthy:
        raise typer.Exit(ANSWER_IS_NO)


def _is_first() -> bool:
    """Whether this process prints, told without importing torch."""
    from shoal.launch.environment import read_placement

    place = read_placement(os.environ)
    return place is None or place.rank == 0
