"""A row becomes segments of text, each trained on or only read.

A new format is one function and one line in `FORMATS`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from shoal.data.sources import Row
from shoal.mistakes import UserMistake, suggestion

Segment = tuple[str, bool]  # the text, and whether the loss counts it


@dataclass(frozen=True)
class Format:
    """`keys`: what a row must have, and by what `auto` knows the format. `joined`: documents are parts of one long
    stream (pretraining) rather than units that must not see each other (instructions)."""

    name: str
    keys: tuple[str, ...]
    segments: Callable[[Row, str], list[Segment]]
    joined: bool = False


def choose_format(name: str, first: Row) -> Format:
    """The format called `name`; `auto` goes by the first row's keys."""
    if name != "auto":
        if name not in FORMATS:
            raise UserMistake(
                f"data.format {name} is not one this version knows. It knows: auto, {', '.join(FORMATS)}."
                + suggestion(name, FORMATS)
            )
        return FORMATS[name]
    for candidate in FORMATS.values():
        if all(key in first.fields for key in candidate.keys):
            return candidate
    wanted = "; ".join(f"{one.name}: {', '.join(one.keys)}" for one in FORMATS.values())
    raise UserMistake(
        f"data.format auto does not recognise {first.where}, which has the keys {_keys(first)}. Known formats need "
        f"({wanted}). Rename the keys, or set data.format."
    )


def segment_row(chosen: Format, row: Row, train_on: str) -> list[Segment]:
    """The row's segments; neighbours of the same kind joined, so that a tokenizer sees as much as it can at once."""
    missing = [key for key in chosen.keys if key not in row.fields]
    if missing:
        raise UserMistake(
            f"{row.where} lacks {', '.join(missing)}, which data.format {chosen.name} needs; its keys are "
            f"{_keys(row)}. Mend the row, choose another data.format, or set data.on_error: skip."
        )
    merged: list[Segment] = []
    for text, trained in chosen.segments(row, train_on):
        if merged and merged[-1][1] == trained:
            merged[-1] = (merged[-1][0] + text, trained)
        else:
            merged.append((text, trained))
    return merged


def _text(row: Row, train_on: str) -> list[Segment]:
    return [(_string(row, "text"), True)]  # all of it is the answer, so train_on changes nothing


# The headers are the convention models know; a prompt ends where the answer begins, so that generating from the
# prompt alone meets exactly the tokens that were trained on.
ALPACA_PROMPT = "Here is a task. Write the answer to it.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
ALPACA_PROMPT_WITH_INPUT = (
    "Here is a task, and below it the material the task is about. Write the answer to it.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, material: str = "") -> str:
    """The prompt of an instruction, for training and for generating alike."""
    if material:
        return ALPACA_PROMPT_WITH_INPUT.format(instruction=instruction, input=material)
    return ALPACA_PROMPT.format(instruction=instruction)


def _alpaca(row: Row, train_on: str) -> list[Segment]:
    material = "" if row.fields.get("input") is None else _string(row, "input")
    prompt = alpaca_prompt(_string(row, "instruction"), material)
    return [(prompt, train_on == "all"), (_string(row, "output"), True)]


def _string(row: Row, key: str) -> str:
    value = row.fields[key]
    if not isinstance(value, str):
        raise UserMistake(
            f"{row.where}: {key} must be text, found a {type(value).__name__}. Mend the row, or set "
            "data.on_error: skip."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair, which is no character
        raise UserMistake(
            f"{row.where}: {key} holds half a character at position {error.start} (a lone \\u escape). Mend the row, "
            "or set data.on_error: skip."
        ) from error
    return value


def _keys(row: Row) -> str:
    return ", ".join(map(str, row.fields)) or "(none)"


# `auto` takes the first that fits, so those with more keys stand first.
FORMATS: dict[str, Format] = {
    "alpaca": Format("alpaca", ("instruction", "output"), _alpaca),
    "text": Format("text", ("text",), _text, joined=True),
}
