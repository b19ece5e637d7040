"""`shoal submit`."""

from typing import Annotated

import typer

from shoal.cli.common import ANSWER_IS_NO, AsJson, File, Overrides, print_json, print_progress


def submit_command(
    file: File,
    overrides: Overrides = None,
    to: Annotated[
        str, typer.Option("--to", metavar="SCHEDULER", help="The scheduler: slurm, kubernetes, skypilot or ray.")
    ] = "slurm",
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its newest checkpoint.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the existing run of this name.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the file that would be submitted, and write nothing.")
    ] = False,
    anyway: Annotated[bool, typer.Option("--anyway", help="Submit a run that will not fit by the forecast.")] = False,
    as_json: AsJson = False,
) -> None:
    """Submit a run to a cluster. The job is requeued when it is preempted or reaches its time limit, and resumes. Does
    not fit: status 3."""
    from shoal import api

    config = api.load_config(file, overrides or [])
    submitted = api.submit(config, to=to, resume=resume, overwrite=overwrite, dry_run=dry_run, anyway=anyway)
    refused = not (submitted.fits or anyway)
    if as_json:
        print_json(submitted.as_dict())
    else:
        for note in submitted.notes:
            print_progress(note)
        if dry_run:
            typer.echo(submitted.text, nl=False)
        elif submitted.job is not None:
            typer.echo(submitted.summary())
        if not submitted.fits:
            from shoal.plan.render import plan_text

            assert submitted.plan is not None
            print_progress(plan_text(submitted.plan))
    if refused:
        print_progress("shoal: The run does not fit by the forecast; change it, or submit it with --anyway.")
        raise typer.Exit(ANSWER_IS_NO)
