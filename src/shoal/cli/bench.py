"""`shoal bench`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import ANSWER_IS_NO, AsJson, File, Overrides, print_json, print_progress
from shoal.mistakes import UserMistake, shortened, suggestion

bench_app = typer.Typer(
    help="Measure training speed, memory and communication.", no_args_is_help=True, rich_markup_mode=None
)


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"


Steps = Annotated[int, typer.Option("--steps", min=1, help="Steps to measure.")]
Warmup = Annotated[int, typer.Option("--warmup", min=1, help="Warmup steps before them, not measured.")]


@bench_app.command()
def train(
    file: File,
    overrides: Overrides = None,
    steps: Steps = 20,
    warmup: Warmup = 5,
    as_json: AsJson = False,
) -> None:
    """Train a few steps as FILE says, without saving, and report throughput, memory and time per step."""
    from shoal import api

    found = api.bench_train(api.load_config(file, overrides or []), steps=steps, warmup=warmup, report=print_progress)
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


@bench_app.command()
def rank(
    file: File,
    overrides: Overrides = None,
    world: Annotated[int, typer.Option("--world", min=1, help="World size of the job.")] = 8,
    real: Annotated[
        bool | None,
        typer.Option(
            "--real/--traced",
            help="Run real steps, or trace one step on fake tensors; default: real if there is a GPU.",
        ),
    ] = None,
    steps: Steps = 10,
    warmup: Warmup = 4,
    as_json: AsJson = False,
) -> None:
    """Run one rank of a larger job and compare its memory and time with the forecast.

    --real: memory and compute are real, collectives return at once, and losses are meaningless. --traced: the real code
    runs on fake tensors, for any model on any machine, and reports the rank's memory by category.
    """
    from shoal import api

    config = api.load_config(file, overrides or [])
    found = api.bench_rank(config, world, steps=steps, warmup=warmup, real=real, report=print_progress)
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


class ScalingStrategy(StrEnum):
    ddp = "ddp"
    fsdp = "fsdp"
    zero1 = "zero1"
    zero2 = "zero2"
    zero3 = "zero3"


Measured = Annotated[
    bool, typer.Option("--measure/--no-measure", help="Train on this machine's devices, or only forecast.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FOLDER", help="Write the JSON object and a plot, as PNG, there."),
]


@bench_app.command()
def scaling(
    file: File,
    overrides: Overrides = None,
    devices: Annotated[str, typer.Option("--devices", metavar="N,N…", help="Numbers of devices.")] = "1,2,4,8",
    strategies: Annotated[
        str, typer.Option("--strategies", metavar="NAME,NAME…", help="Strategies to compare.")
    ] = "ddp,fsdp",
    steps: Steps = 10,
    warmup: Warmup = 4,
    measures: Measured = True,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Train the same global batch on more and more devices: time, speed-up, efficiency and memory, beside the forecast.

    Numbers of devices that this machine does not have are forecast only.
    """
    from shoal import api

    counts, names = _counts(devices), _names(strategies)
    found = api.bench_scaling(
        api.load_config(file, overrides or []),
        devices=counts,
        strategies=names,
        steps=steps,
        warmup=warmup,
        measures=measures,
        output=output,
        report=print_progress,
    )
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


@bench_app.command()
def batch(
    file: File,
    overrides: Overrides = None,
    up_to: Annotated[
        int | None,
        typer.Option("--up-to", min=1, help="Largest micro-batch; default: until memory is full, or 8 on a CPU."),
    ] = None,
    steps: Steps = 10,
    warmup: Warmup = 4,
    measures: Measured = True,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Double the micro-batch until it no longer fits, with and without activation checkpointing: time, tokens/s and
    memory, beside the forecast."""
    from shoal import api

    found = api.bench_batch(
        api.load_config(file, overrides or []),
        up_to=up_to,
        steps=steps,
        warmup=warmup,
        measures=measures,
        output=output,
        report=print_progress,
    )
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


@bench_app.command()
def hardware(
    devices: Annotated[
        int | None, typer.Option("--devices", min=1, help="Devices whose links are measured; default: every GPU.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the block hardware there, as YAML to include."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure this machine for the forecast: matmuls, attention, copies, the host's time per block, and links.

    A config that includes the file is forecast for this machine, by what it reaches instead of what such devices do.
    """
    from shoal import api

    found = api.bench_hardware(devices=devices, output=output, report=print_progress)
    if as_json:
        print_json(found.as_dict())
        return
    typer.echo(found.text())
    if output is None:
        typer.echo(found.yaml(), nl=False)
    else:
        typer.echo(f"shoal plan {output} model.shape=… forecasts for it; so does a config that includes that file.")


def _counts(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserMistake(f"--devices '{text}' is not a list of numbers of devices, such as 1,2,4,8.")
    return [int(part) for part in parts]


def _names(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    for name in names:
        if name not in set(ScalingStrategy):
            raise UserMistake(
                f"--strategies: {shortened(name)} is not one of {', '.join(ScalingStrategy)}."
                f"{suggestion(name, ScalingStrategy)}"
            )
    return names


@bench_app.command()
def collectives(
    devices: Annotated[
        int | None, typer.Option("--devices", help="Processes to start; default: one per GPU, or 2 on a CPU.")
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            "--largest", metavar="SIZE", help="Largest message size; default: 256MiB on CUDA, 64MiB on a CPU."
        ),
    ] = None,
    dtype: Annotated[Dtype, typer.Option("--dtype", help="Data type of the messages.")] = Dtype.fp32,
    repeat: Annotated[int, typer.Option("--repeat", help="Maximum samples per collective and size.")] = 20,
    seconds: Annotated[
        float, typer.Option("--seconds", help="Time limit per collective and size; fewer samples are taken beyond it.")
    ] = 1.0,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="NAME", help="Compare with this link, such as nvlink4, not the best measured."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FOLDER", help="Write collectives.json and .png there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time all-reduce, all-gather and reduce-scatter by size, against the ring formula. Wrong results: status 3."""
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
