"""The terminal: parse, call, print. Whatever a command does is a function in `shoal.api`."""

import contextlib
import importlib
import shlex
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal import __version__
from shoal.cli.bench import bench_app
from shoal.cli.checkpoints import checkpoints
from shoal.cli.common import FAILED, MISTAKEN, STOPPED_EARLY, AsJson, File, Overrides, print_json
from shoal.cli.imports import import_command
from shoal.cli.plan import plan_command
from shoal.mistakes import RunFailed, UserMistake

app = typer.Typer(
    help="Train and fine-tune transformers on one device or many, from one YAML file.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at a config before using it.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")
app.add_typer(bench_app, name="bench")
app.command("checkpoints")(checkpoints)
app.command("plan")(plan_command)

Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/NAME.")]
Model = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/NAME, or a Hugging Face folder.")
]
Step = Annotated[int | None, typer.Option("--step", help="The checkpoint's step; default: the newest.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, or cuda:1 and so on; default: CUDA if there is any.")]
Temperature = Annotated[
    float, typer.Option("--temperature", help="How far to stray from the likeliest token; 0: not at all.")
]
TopP = Annotated[float, typer.Option("--top-p", help="Choose among the likeliest tokens that make up this share.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Choose among this many of the likeliest tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same text.")]


class ExportFormat(StrEnum):
    hf = "hf"


class ExportDtype(StrEnum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shoal {__version__}")
        raise typer.Exit


@app.callback()
def shoal(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    file: File,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")] = False,
    start_from: Annotated[
        Path | None, typer.Option("--from", metavar="CHECKPOINT", help="Start from this checkpoint's folder.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Throw away the run of this name.")] = False,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Restart all processes this often when one dies.")
    ] = 0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Read everything, show what would happen, and train nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train. Ctrl-C, TERM, USR1 and USR2 finish the step, save, and exit with status 75."""
    from shoal import api

    config = api.load_config(file, overrides or [])
    if dry_run:
        preview = api.dry_run(config)
        print_json(preview.as_dict()) if as_json else typer.echo(preview.text())
        return
    summary = api.train(
        config,
        resume=resume,
        start_from=start_from,
        overwrite=overwrite,
        max_restarts=max_restarts,
    )
    if as_json:
        print_json(summary.as_dict())
    else:
        typer.echo(summary.text())
    if summary.stopped == "signal":
        again = shlex.join(["shoal", "train", str(file), *(overrides or []), "--resume"])
        typer.echo(f"Stopped early, with everything saved. Go on with: {again}", err=True)
        raise typer.Exit(STOPPED_EARLY)


@app.command()
def init(
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE]", help="Which; without one, they are listed.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: RECIPE.yaml.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a commented config file to start from."""
    from shoal import api

    if recipe is None:
        recipes = api.recipes()
        listing = "\n".join(f"{name:16}{about}" for name, about in recipes.items())
        print_json({"recipes": recipes}) if as_json else typer.echo(listing)
        return
    written = api.init(recipe, output)
    print_json({"output": str(written)}) if as_json else typer.echo(
        f"{written}: now edit it, then shoal train {written}"
    )


@app.command()
def download(
    name: Annotated[str, typer.Argument(metavar="ID", help="On the Hugging Face hub: owner/name.")],
    dataset: Annotated[bool, typer.Option("--dataset", help="A dataset, not a model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fetch a model or a dataset into the local cache, where there is a network. Compute nodes often have none."""
    from shoal import api

    folder = api.download(name, dataset=dataset)
    print_json({"folder": str(folder)}) if as_json else typer.echo(str(folder))


@app.command()
def export(
    run: Run,
    to: Annotated[ExportFormat, typer.Option("--to", help="The format.")] = ExportFormat.hf,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where to write; default: RUN/hf.")] = None,
    step: Step = None,
    dtype: Annotated[ExportDtype | None, typer.Option("--dtype", help="Default: as the weights were trained.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run as a Hugging Face folder, which plain transformers loads."""
    from shoal import api

    written = api.export(run, output, step=step, dtype=dtype, report=lambda text: typer.echo(text, err=True))
    if as_json:
        print_json({"output": str(written), "format": to.value})
    else:
        typer.echo(str(written))


app.command("import")(import_command)


@app.command()
def generate(
    run: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to go on from, or the instruction.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Write at most this many tokens.")] = 100,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    seed: Seed = None,
    step: Step = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Take the prompt as it is, also where the run was trained on instructions.")
    ] = False,
    device: Device = "auto",
    dtype: Annotated[ExportDtype | None, typer.Option("--dtype", help="Default: as the weights were saved.")] = None,
    as_json: AsJson = False,
) -> None:
    """Let a run's model write. What it writes goes to standard output as it comes, up to its end token."""
    from shoal import api

    generated = api.generate(
        run,
        prompt,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        raw=raw,
        step=step,
        device=device,
        dtype=dtype,
        write=(lambda _: None) if as_json else _print_piece,
    )
    if as_json:
        print_json(generated.as_dict())
    else:
        typer.echo()
        if generated.cut_off:
            typer.echo("(cut off: the model has no more positions)", err=True)


@app.command()
def chat(
    run: Model,
    tokens: Annotated[int, typer.Option("--tokens", help="At most this many tokens an answer.")] = 500,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    seed: Seed = None,
    step: Step = None,
    device: Device = "auto",
    dtype: Annotated[ExportDtype | None, typer.Option("--dtype", help="Default: as the weights were saved.")] = None,
) -> None:
    """Talk to a run's model, a line at a time. Ctrl-D ends, /reset forgets, Ctrl-C stops an answer."""
    from shoal import api

    api.chat(
        run,
        _typed_lines(),
        write=_print_piece,
        say=lambda text: typer.echo(text, err=True),
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        step=step,
        device=device,
        dtype=dtype,
    )


@app.command("eval")
def evaluate(
    run: Run,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Other data, as in data.path=FILE.")
    ] = None,
    step: Step = None,
    batches: Annotated[
        int | None, typer.Option("--batches", min=1, help="Global batches to take; default: all that was held out.")
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Loss and perplexity of a run on the rows it held out, or on all rows of another data.path."""
    from shoal import api

    found = api.evaluate(
        run,
        overrides or [],
        step=step,
        batches=batches,
        device=device,
        report=lambda text: typer.echo(text, err=True),
    )
    if as_json:
        print_json(found.as_dict())
    else:
        typer.echo(
            f"{found.run}, step {found.step}: loss {found.eval_loss:.4f}, perplexity {found.eval_perplexity:.2f} "
            f"({found.tokens:,} tokens in {found.rows:,} rows)"
        )


@config_app.command("show")
def config_show(file: File, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the resolved config: every key, with defaults, includes and overrides applied."""
    from shoal import api

    config = api.load_config(file, overrides or [])
    if as_json:
        print_json(api.config_values(config))
    else:
        typer.echo(api.config_to_yaml(config), nl=False)


@config_app.command("schema")
def config_schema(as_json: AsJson = False) -> None:
    """Print the JSON Schema of the config, for editors and other programs. It is JSON with or without --json."""
    from shoal import api

    print_json(api.json_schema())


def _print_piece(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _typed_lines() -> Iterator[str]:
    """What is typed, or comes through a pipe, until Ctrl-D or its end."""
    typed = sys.stdin.isatty()
    if typed:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # which gives input() arrow keys and a history
    while True:
        try:
            yield input("> " if typed else "")
        except EOFError:
            if typed:
                typer.echo()
            return
        except KeyboardInterrupt:  # meant for an answer that has just ended, as likely as not
            typer.echo()


def main() -> None:
    """The `shoal` command. A mistake is one sentence and status 2; a failed run is status 1."""
    try:
        app()
    except UserMistake as mistake:
        typer.echo(f"shoal: {mistake}", err=True)
        sys.exit(MISTAKEN)
    except RunFailed as failure:
        typer.echo(f"shoal: {failure}", err=True)
        sys.exit(FAILED)
