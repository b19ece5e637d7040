"""`shoal eval`: the loss on held-out data, the score of generated answers, or tasks of lm-evaluation-harness."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Protocol

import typer

from shoal.cli.common import AsJson, Step, print_json, print_progress
from shoal.cli.use import Device, Dtype, Model
from shoal.mistakes import UserMistake

Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Other data, such as data.path=FILE.")
]
Generate = Annotated[bool, typer.Option("--generate", help="Generate an answer to each held-out prompt, and score it.")]
Score = Annotated[
    str | None,
    typer.Option(
        "--score",
        metavar="MODULE:FUNCTION",
        help="With --generate: a function of yours in place of exact match, called with answer, expected answer and "
        "record; or FILE.py:FUNCTION.",
    ),
]
Tasks = Annotated[
    str | None, typer.Option("--tasks", metavar="NAMES", help="Tasks of lm-evaluation-harness, separated by commas.")
]
TaskPath = Annotated[
    Path | None, typer.Option("--task-path", metavar="FOLDER", help="With --tasks: a folder that defines tasks.")
]
Fewshot = Annotated[
    int | None, typer.Option("--fewshot", min=0, help="With --tasks: examples in the prompt; default: the task's.")
]
Chat = Annotated[bool, typer.Option("--chat", help="With --tasks: put the prompts into the tokenizer's chat template.")]
AllowCode = Annotated[bool, typer.Option("--allow-code", help="Run the code that --score or --task-path names.")]
Examples = Annotated[
    int | None, typer.Option("--examples", "-n", min=1, help="With --generate or --tasks: only the first examples.")
]
Tokens = Annotated[
    int | None,
    typer.Option(
        "--tokens",
        min=1,
        help="With --generate: maximum number of new tokens; default: twice the longest answer, at least 16.",
    ),
]
Batch = Annotated[
    int | None, typer.Option("--batch", min=1, help="With --generate or --tasks: prompts at a time; default: 16.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="FILE", help="With --generate: write every answer, as JSON Lines."),
]
Batches = Annotated[
    int | None, typer.Option("--batches", min=1, help="Global batches to evaluate; default: the whole held-out set.")
]


class Result(Protocol):
    """What every evaluation returns."""

    def as_dict(self) -> dict[str, Any]: ...

    def text(self) -> str: ...


def evaluate(
    run: Model,
    overrides: Overrides = None,
    generate: Generate = False,
    score: Score = None,
    tasks: Tasks = None,
    task_path: TaskPath = None,
    fewshot: Fewshot = None,
    chat: Chat = False,
    allow_code: AllowCode = False,
    examples: Examples = None,
    tokens: Tokens = None,
    batch: Batch = None,
    output: Output = None,
    dtype: Dtype = None,
    step: Step = None,
    batches: Batches = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Evaluate on a run's held-out data, or on all of another data.path.

    Loss and perplexity; with --generate, the score of generated answers; with --tasks, lm-evaluation-harness.
    """
    given = {
        "--score": score,
        "--task-path": task_path,
        "--fewshot": fewshot,
        "--chat": chat or None,
        "--allow-code": allow_code or None,
        "--examples": examples,
        "--tokens": tokens,
        "--batch": batch,
        "--output": output,
        "--dtype": dtype,
        "--batches": batches,
    }
    _refuse_options(given, generate=generate, tasks=tasks is not None)
    from shoal import api

    found: Result
    loaded: Any = {"step": step, "device": device, "report": print_progress}
    shared: Any = {**loaded, "dtype": dtype, "allow_code": allow_code, "examples": examples, "batch": batch or 16}
    if tasks is not None:
        if overrides:
            raise UserMistake(f"{overrides[0]} has no effect with --tasks: a task has its own data.")
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        found = api.evaluate_tasks(run, names, folder=task_path, fewshot=fewshot, chat=chat, **shared)
    elif generate:
        found = api.evaluate_answers(run, overrides or [], score=score, tokens=tokens, output=output, **shared)
    else:
        found = api.evaluate(run, overrides or [], batches=batches, **loaded)
    print_json(found.as_dict()) if as_json else typer.echo(found.text())


# Which of the three ways to evaluate an option is for.
_LOSS, _GENERATE, _TASKS = "the loss", "--generate", "--tasks"
_OPTIONS = {
    "--score": (_GENERATE,),
    "--task-path": (_TASKS,),
    "--fewshot": (_TASKS,),
    "--chat": (_TASKS,),
    "--allow-code": (_GENERATE, _TASKS),
    "--examples": (_GENERATE, _TASKS),
    "--tokens": (_GENERATE,),
    "--batch": (_GENERATE, _TASKS),
    "--output": (_GENERATE,),
    "--dtype": (_GENERATE, _TASKS),
    "--batches": (_LOSS,),
}


def _refuse_options(given: Mapping[str, object], *, generate: bool, tasks: bool) -> None:
    """Nothing is ignored silently: an option for another way to evaluate is a mistake."""
    if generate and tasks:
        raise UserMistake("--generate and --tasks are two evaluations; give one of them.")
    chosen = _TASKS if tasks else _GENERATE if generate else _LOSS
    for option, ways in _OPTIONS.items():
        if given[option] is not None and chosen not in ways:
            hint = "use train.precision=…" if option == "--dtype" else f"it is for {' and '.join(ways)}"
            raise UserMistake(f"{option} has no effect on {chosen}; {hint}.")
