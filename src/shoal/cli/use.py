"""`shoal generate` and `shoal chat`: the commands with which a model writes text."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.common import AsJson, Step, WeightDtype, print_json, print_progress

Model = Annotated[
    Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/NAME, or a Hugging Face folder.")
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda, or a single GPU such as cuda:1; default: CUDA if available.")
]
Dtype = Annotated[WeightDtype | None, typer.Option("--dtype", help="Default: as the weights were saved.")]
Temperature = Annotated[float, typer.Option("--temperature", help="Sampling temperature; 0 = greedy.")]
TopP = Annotated[
    float, typer.Option("--top-p", help="Nucleus sampling: the most likely tokens up to this total probability.")
]
TopK = Annotated[int | None, typer.Option("--top-k", help="Sample from this many of the most likely tokens.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed; the same seed gives the same text.")]


def generate(
    run: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue, or the instruction.")],
    tokens: Annotated[int, typer.Option("--tokens", help="Maximum number of new tokens.")] = 100,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    seed: Seed = None,
    step: Step = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Do not apply the instruction template, even if the run was trained with it.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Generate text. It is streamed to standard output until the end token or the token limit."""
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
        write=(lambda _: None) if as_json else _print_chunk,
    )
    if as_json:
        print_json(generated.as_dict())
    else:
        typer.echo()
        if not generated.text:
            typer.echo("(no text: the model ended it at once; --seed N may give another)", err=True)
        if generated.cut_off:
            typer.echo("(truncated: the model's context length is reached)", err=True)


def chat(
    run: Model,
    tokens: Annotated[int, typer.Option("--tokens", help="Maximum number of new tokens per answer.")] = 500,
    temperature: Temperature = 1.0,
    top_p: TopP = 1.0,
    top_k: TopK = None,
    seed: Seed = None,
    step: Step = None,
    device: Device = "auto",
    dtype: Dtype = None,
) -> None:
    """Chat with a model, one line per message. Ctrl-D exits, /reset clears the history, Ctrl-C stops an answer."""
    from shoal import api

    api.chat(
        run,
        _input_lines(),
        write=_print_chunk,
        say=print_progress,
        tokens=tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        step=step,
        device=device,
        dtype=dtype,
    )


def _print_chunk(text: str) -> None:
    typer.echo(text, nl=False)
    sys.stdout.flush()


def _input_lines() -> Iterator[str]:
    """Lines from the terminal or a pipe, until Ctrl-D or end of file."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")  # gives input() line editing and a history
    while True:
        try:
            yield input("> " if interactive else "")
        except EOFError:
            if interactive:
                typer.echo()
            return
        except KeyboardInterrupt:  # probably meant for an answer that has just ended
            typer.echo()
