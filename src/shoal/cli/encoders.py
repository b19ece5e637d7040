"""`shoal embed` and `shoal predict`: what an encoder makes of examples."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, Run, Step, print_json, print_progress
from shoal.cli.use import Device

Data = Annotated[
    list[str] | None,
    typer.Argument(metavar="[DATA]...", help="A file, or keys such as data.path=FILE; default: the run's own data."),
]
Batch = Annotated[int, typer.Option("--batch", min=1, help="Examples per forward pass.")]


def embed(
    run: Run,
    data: Data = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="A .npy or .safetensors file; for cells, .h5ad.")
    ] = Path("embeddings.npy"),
    pool: Annotated[
        str, typer.Option("--pool", help="mean: of all tokens; cls: the first token, which stands for the example.")
    ] = "mean",
    step: Step = None,
    device: Device = "auto",
    batch: Batch = 32,
    as_json: AsJson = False,
) -> None:
    """Write the embedding of each example. In an .h5ad file it is obsm["X_shoal"]."""
    from shoal import api

    found = api.embed(
        run,
        as_changes(data),
        output=output,
        pool=pool,
        step=step,
        device=device,
        batch=batch,
        report=print_progress,
    )
    examples, width = found.embeddings.shape
    if as_json:
        print_json({"run": found.run, "step": found.step, "examples": examples, "size": width, "output": str(output)})
    else:
        typer.echo(f"{examples:,} embeddings of size {width}, {pool} of step {found.step}: {output}")


def predict(
    run: Run,
    data: Data = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="A .jsonl file; for cells, .h5ad.")
    ] = Path("predictions.jsonl"),
    step: Step = None,
    device: Device = "auto",
    batch: Batch = 32,
    as_json: AsJson = False,
) -> None:
    """Write the class of each example, with the probability of every class."""
    from shoal import api

    found = api.predict(
        run, as_changes(data), output=output, step=step, device=device, batch=batch, report=print_progress
    )
    counts = {name: found.labels.count(name) for name in found.classes or ()}
    if as_json:
        examples = len(found.places)
        print_json(
            {"run": found.run, "step": found.step, "examples": examples, "classes": counts, "output": str(output)}
        )
    else:
        named = ", ".join(f"{name} {count:,}" for name, count in counts.items())
        typer.echo(f"{len(found.places):,} examples ({named}): {output}")


def as_changes(data: list[str] | None) -> list[str]:
    """A path stands for data.path."""
    return [one if "=" in one else f"data.path={one}" for one in data or ()]
