"""`shoal bench`: parse, call, print, as in `cli.py`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import ANSWER_IS_NO, AsJson, File, Overrides, print_json

bench_app = typer.Typer(help="Measure what a run's speed depends on.", no_args_is_help=True, rich_markup_mode=None)


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps that are measured.")]
Warmup = Annotated[int, typer.Option("--warmup", min=1, help="Steps before them, which compile and settle.")]


@bench_app.command()
def train(
    file: File,
    overrides: Overrides = None,
    steps: Steps = 20,
    warmup: Warmup = 5,
    as_json: AsJson = False,
) -> None:
    """Train some steps as FILE says, save nothing, and say how fast it was and what it took."""
    from shoal import api

    found = api.bench_train(api.load_config(file, overrides or []), steps=steps, warmup=warmup, report=_say)
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


@bench_app.command()
def rank(
    file: File,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option("--world", min=1, help="Ranks that the whole job would have.")] = 8,
    real: Annotated[
        bool | None,
        typer.Option(
            "--real/--traced",
            help="Train really, or trace a step on tensors that have no values; default: really, where there is a GPU.",
        ),
    ] = None,
    steps: Steps = 10,
    warmup: Warmup = 4,
    as_json: AsJson = False,
) -> None:
    """Be one rank of a job of many, and hold what it takes against the forecast.

    Really: memory and compute are real, exchanges return at once, and losses mean nothing. Traced: the real code runs
    without values, for any model on any machine, and says what memory a rank needs for what.
    """
    from shoal import api

    config = api.load_config(file, overrides or [])
    found = api.bench_rank(config, world, steps=steps, warmup=warmup, real=real, report=_say)
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


def _say(sentence: str) -> None:
    typer.echo(sentence, err=True)


@bench_app.command()
def collectives(
    devices: Annotated[
        int | None, typer.Option("--devices", help="Processes to start; default: one a GPU, or 2 on a CPU.")
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option("--largest", metavar="SIZE", help="Sizes go up to this; default: 256MiB on CUDA, 64MiB on a CPU."),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="What is sent and summed.")] = Dtype.fp32,
    repeat: Annotated[int, typer.Option("--repeat", help="Samples of each operation and size, at most.")] = 20,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Fewer samples, where they would take longer than this.")
    ] = 1.0,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="NAME", help="Hold it against this link, such as nvlink4, not the best seen."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write collectives.json and .png there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """All-reduce, all-gather and reduce-scatter by size, against the ring formula. Wrong results are status 3."""
    from shoal import api

    report = api.bench_collectives(
        devices=devices, largest=largest, dtype=dtype, repeat=repeat, seconds=seconds, link=link, output=output
    )
    from shoal.launch.join import is_first

    if is_first():
        print_json(report.as_dict()) if as_json else typer.echo(report.text())
    if not report.correct:
        if is_first():
            typer.echo(f"shoal: {report.fault()}", err=True)
        raise typer.Exit(ANSWER_IS_NO)
