"""`shoal export`, `shoal merge` and `shoal import`: to and from other checkpoint formats."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, Run, Step, WeightDtype, print_json, print_progress


class ExportFormat(StrEnum):
    hf = "hf"


def export_command(
    run: Run,
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.")] = ExportFormat.hf,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the adapter of a LoRA run, as a folder that PEFT loads.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder to write; default: RUN/hf, or RUN/adapter with --adapter."),
    ] = None,
    step: Step = None,
    dtype: Annotated[WeightDtype | None, typer.Option("--dtype", help="Default: as the weights were trained.")] = None,
    as_json: AsJson = False,
) -> None:
    """Export a run as a Hugging Face folder that transformers loads without shoal, or its adapter for PEFT."""
    from shoal import api

    written = api.export(run, output, adapter=adapter, step=step, dtype=dtype, report=print_progress)
    if as_json:
        print_json({"output": str(written), "format": "peft" if adapter else to.value})
    else:
        typer.echo(str(written))


def merge_command(
    run: Run,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The folder to write; default: RUN/merged.")
    ] = None,
    step: Step = None,
    dtype: Annotated[WeightDtype | None, typer.Option("--dtype", help="Default: as in the base model's files.")] = None,
    compare: Annotated[
        bool,
        typer.Option("--compare/--no-compare", help="Compare the logits of the merged model with those of the run."),
    ] = True,
    device: Annotated[
        str, typer.Option("--device", help="Where they are computed; default: CUDA if available.")
    ] = "auto",
    as_json: AsJson = False,
) -> None:
    """Merge the adapter of a LoRA run into its base model: a Hugging Face folder with the complete weights."""
    from shoal import api

    merged = api.merge(run, output, step=step, dtype=dtype, compare=compare, device=device, report=print_progress)
    if as_json:
        print_json(merged.as_dict())
    else:
        typer.echo(merged.text())


def import_command(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A LitGPT or DeepSpeed folder, or a .pth, .pt or .bin file of weights."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="CONFIG_FOLDER",
            help="The folder with the config.json and tokenizer of these weights; default: next to the weights.",
        ),
    ] = None,
    dtype: Annotated[WeightDtype | None, typer.Option("--dtype", help="Default: as the weights were saved.")] = None,
    as_json: AsJson = False,
) -> None:
    """Convert a LitGPT, DeepSpeed or FSDP checkpoint to a Hugging Face folder. No code in the file is run."""
    from shoal import api

    imported = api.import_checkpoint(source, output, model=model, dtype=dtype, report=print_progress)
    if as_json:
        print_json(imported.as_dict())
    else:
        typer.echo(imported.output)
