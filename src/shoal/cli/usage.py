"""A mistyped command line, as one sentence like every other mistake."""

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from shoal.mistakes import UserMistake

# Newer versions of typer have a copy of click of their own: BadParameter is what all of them export.
UsageError: Any = typer.BadParameter.__mro__[1]
HELP = "NoArgsIsHelpError"
# The parser's own words, and what we say.
PLAIN = {
    "Value error, ": "",
    "Input should be a valid integer, unable to parse string as an integer": "it must be an integer",
    "Input should be a valid number, unable to parse string as a number": "it must be a number",
    "Input should be": "it must be",
}
INSTEAD = {"'gguf' is not": "llama.cpp's convert_hf_to_gguf.py makes a GGUF file of the folder that --to hf writes"}


def sentence(error: Any) -> str:
    text = error.format_message()
    for theirs, ours in PLAIN.items():
        text = text.replace(theirs, ours)
    parts = [text.rstrip("."), *(advice for found, advice in INSTEAD.items() if found in text)]
    if error.ctx is not None and not text.endswith("?"):
        parts.append(f"{error.ctx.command_path} -h lists the {'commands' if is_group(error) else 'options'}")
    return "; ".join(parts) + ("" if text.endswith("?") else ".")


def is_group(error: Any) -> bool:
    return isinstance(error.ctx.command, TyperGroup)


class OneSentence(TyperGroup):
    """The group of all commands. Those below it are parsed in `invoke`."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        return in_one_sentence(super().make_context, *arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        return in_one_sentence(super().invoke, ctx)


def in_one_sentence(parse: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    try:
        return parse(*arguments, **options)
    except UsageError as error:
        if type(error).__name__ == HELP:  # `shoal`, `shoal data`: its text is the help
            raise
        raise UserMistake(sentence(error)) from None
