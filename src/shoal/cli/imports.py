"""`shoal import`: parse, call, print, as in `cli.py`."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, print_json


class Dtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def import_command(
    source: Annotated[
        Path,
        typer.Argument(metavar="SOURCE", help="A LitGPT or DeepSpeed folder, or a .pth, .pt or .bin file of weights."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where to write.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="CONFIG_FOLDER",
            help="The folder whose config.json and tokenizer these weights go with; default: what lies beside them.",
        ),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option("--dtype", help="Default: as the weights were saved.")] = None,
    as_json: AsJson = False,
) -> None:
    """Make a Hugging Face folder of a LitGPT, DeepSpeed or FSDP checkpoint. No code in the file is run."""
    from shoal import api

    imported = api.import_checkpoint(
        source, output, model=model, dtype=dtype, report=lambda text: typer.echo(text, err=True)
    )
    if as_json:
        print_json(imported.as_dict())
    else:
        typer.echo(imported.output)
