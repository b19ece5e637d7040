"""`shoal export`, `shoal merge` and `shoal import`: to and from other systems' checkpoints and configs."""

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from shoal.cli.common import AsJson, Run, Step, WeightDtype, print_json, print_progress
from shoal.mistakes import UserMistake

COMMAND = "shoal.import.command"


class ExportFormat(StrEnum):
    hf = "hf"
    litgpt = "litgpt"


def export_command(
    run: Run,
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.")] = ExportFormat.hf,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export the adapter of a LoRA run, as a folder that PEFT loads.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The folder to write; default: RUN/hf, RUN/litgpt or RUN/adapter."),
    ] = None,
    step: Step = None,
    dtype: Annotated[WeightDtype | None, typer.Option("--dtype", help="Default: as the weights were trained.")] = None,
    as_json: AsJson = False,
) -> None:
    """Export a run as a Hugging Face folder that transformers loads without shoal, as a LitGPT checkpoint, or its
    adapter for PEFT."""
    from shoal import api

    written = api.export(run, output, to=to.value, adapter=adapter, step=step, dtype=dtype, report=print_progress)
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


class ImportCommand(TyperCommand):
    """`shoal import FILE... -- COMMAND`: what follows the two dashes is another system's command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            at = args.index("--")
            ctx.meta[COMMAND] = shlex.join(args[at + 1 :])
            args = args[:at]
        return super().parse_args(ctx, args)


def import_command(
    context: typer.Context,
    sources: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]... [-- COMMAND]",
            help="Configs, commands in a file or a batch script of other systems; or one checkpoint: a LitGPT, "
            "DeepSpeed or DCP folder, or a .pth, .pt or .bin file of weights.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="PATH",
            help="The YAML file to write (default: beside the first file), or the folder for weights.",
        ),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing YAML file.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="CONFIG_FOLDER",
            help="The folder with the config.json and tokenizer of these weights; default: next to the weights.",
        ),
    ] = None,
    dtype: Annotated[
        WeightDtype | None, typer.Option("--dtype", help="Of weights; default: as they were saved.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Translate configs and commands of other systems to a YAML file, or convert a checkpoint to a Hugging Face folder.

    DeepSpeed, Accelerate, the Hugging Face Trainer, TRL, LitGPT, axolotl, LLaMA-Factory, torchtune, scModelForge,
    Hydra, torchrun, sbatch. Several files that belong together are given at once. Nothing in them is run.
    """
    from shoal import api

    files, command = sources or [], context.meta.get(COMMAND, "")
    if not files and not command:
        raise UserMistake("Give a FILE, or a command behind two dashes: shoal import -- litgpt finetune_lora …")
    if not api.is_foreign_config(files, command):
        if output is None:
            raise UserMistake(
                f"{files[0]} is not a config, so it is taken for a checkpoint: give --output, the Hugging Face folder "
                "to write."
            )
        if overwrite:
            raise UserMistake("--overwrite is for YAML files: a folder of weights is never replaced.")
        imported = api.import_checkpoint(files[0], output, model=model, dtype=dtype, report=print_progress)
        print_json(imported.as_dict()) if as_json else typer.echo(imported.output)
        return
    if model is not None or dtype is not None:
        raise UserMistake("--model and --dtype are for weights: a config has neither.")
    translated = api.import_config(files, command, output, overwrite=overwrite)
    if as_json:
        print_json(translated.as_dict())
    else:
        typer.echo(f"{api.describe_import(translated)}\n\nwrote {translated.output}")
