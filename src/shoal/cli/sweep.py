"""`shoal sweep`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import FAILED, STOPPED_EARLY, AsJson, File, print_json, print_progress

Varied = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE,...]...",
        help="Config overrides. Commas separate values to try: train.lr=1e-4,3e-4; a list is one value: [a,b]. A "
        "range, log(1e-5,1e-3), uniform, int or log_int, needs --random or --optuna.",
    ),
]


class Pruner(StrEnum):
    median = "median"
    hyperband = "hyperband"
    none = "none"


class Where(StrEnum):
    local = "local"
    slurm = "slurm"


def sweep(
    file: File,
    overrides: Varied = None,
    name: Annotated[
        str | None, typer.Option("--name", help="The sweep's folder under runs/; default: NAME-sweep.")
    ] = None,
    runs: Annotated[
        Path | None, typer.Option("--runs", metavar="DIR", help="The folder for runs, in place of run_dir.")
    ] = None,
    random: Annotated[
        int | None, typer.Option("--random", min=1, metavar="N", help="Draw N members in place of a grid.")
    ] = None,
    listed: Annotated[
        Path | None, typer.Option("--list", metavar="F", help="Members from a YAML list or JSON lines of overrides.")
    ] = None,
    optuna: Annotated[
        int | None, typer.Option("--optuna", min=1, metavar="N", help="Let Optuna choose N members, one by one.")
    ] = None,
    pruner: Annotated[
        Pruner, typer.Option("--pruner", help="With --optuna: how members that do worse are ended early.")
    ] = Pruner.median,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of --random and --optuna.")] = 0,
    metric: Annotated[
        str | None,
        typer.Option("--metric", help="Compare members by this key of metrics.jsonl; default: eval_loss or loss."),
    ] = None,
    on: Annotated[Where, typer.Option("--on", help="Where members run: slurm submits a job array.")] = Where.local,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Also run the members again that have failed.")
    ] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Also start members that the plan says do not fit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the members, without training.")] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="F", help="The plot, .png or .svg; default: sweep.png.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a config with several values of some keys, and compare the runs.

    The same command again continues: members that have finished are not repeated. A member that failed: status 1.
    """
    from shoal import api

    outcome = api.sweep(
        file,
        overrides or [],
        name=name,
        runs=runs,
        random=random,
        listed=listed,
        trials=optuna,
        pruner=pruner.value,
        seed=seed,
        metric=metric,
        on=on.value,
        retry_failed=retry_failed,
        anyway=anyway,
        dry_run=dry_run,
        plot=plot,
        report=print_progress,
    )
    if as_json:
        print_json(outcome.as_dict())
    else:
        typer.echo(outcome.text() if outcome.script is None else f"{outcome.script}\n{outcome.text()}")
    if outcome.stopped:
        typer.echo("Stopped early; the same command continues.", err=True)
        raise typer.Exit(STOPPED_EARLY)
    if outcome.table.count("failed"):
        raise typer.Exit(FAILED)
