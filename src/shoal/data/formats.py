"""Formats: how a record becomes documents, whose segments of text count in the loss or are masked.

A new format is one function and one line in `FORMATS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.data.sources import Record
from shoal.mistakes import UserMistake, suggestion
from shoal.paths import LONGEST_SHOWN

Segment = tuple[str, bool]  # the text, and whether the loss counts it


@dataclass(frozen=True, slots=True)
class Document:
    """A document as text. Its segments are tokenized separately, so that a prompt has the same tokens as in generation,
    or as one text (`whole`), as a chat template is."""

    segments: list[Segment]
    whole: bool = False
    begin: bool = True  # the tokenizer's begin token is prepended, if it does so
    end: bool = True  # the end token is appended
    continues: bool = False  # a document that the previous one of its file began
    continued: bool = False  # by the next


@dataclass(frozen=True)
class Options:
    """What the user chose about the content of documents."""

    train_on: str = "answers"


@dataclass(frozen=True)
class Format:
    """`keys`: required in every record, and how `auto` recognizes the format. `joined`: documents are concatenated into
    one stream (pretraining) rather than kept apart by the attention mask (instructions)."""

    name: str
    keys: tuple[str, ...]
    document: Callable[[Record, Options], Document]
    joined: bool = False


def choose_format(name: str, first: Record) -> Format:
    """The format called `name`; `auto` chooses by the keys of the first record."""
    if name != "auto":
        if name not in FORMATS:
            raise UserMistake(
                f"data.format {name} is not supported. Supported formats: auto, {', '.join(FORMATS)}."
                + suggestion(name, FORMATS)
            )
        return FORMATS[name]
    for candidate in FORMATS.values():
        if all(key in first.fields for key in candidate.keys):
            return candidate
    wanted = "; ".join(f"{one.name}: {', '.join(one.keys)}" for one in FORMATS.values())
    raise UserMistake(
        f"data.format auto does not recognize {first.where}, which has the keys {_keys(first)}. Known formats need "
        f"({wanted}). Rename the keys, or set data.format."
    )


def read_document(chosen: Format, record: Record, options: Options) -> Document:
    """The document of a record; adjacent segments of the same kind are merged before tokenization."""
    missing = [key for key in chosen.keys if key not in record.fields]
    if missing:
        raise UserMistake(
            f"{record.where} lacks {', '.join(missing)}, which data.format {chosen.name} needs; its keys are "
            f"{_keys(record)}. Fix the record, choose another data.format, or set data.on_error: skip."
        )
    document = chosen.document(record, options)
    merged: list[Segment] = []
    for text, trained in document.segments:
        if merged and merged[-1][1] == trained:
            merged[-1] = (merged[-1][0] + text, trained)
        else:
            merged.append((text, trained))
    return document if len(merged) == len(document.segments) else replace(document, segments=merged)


def _text(record: Record, options: Options) -> Document:
    return Document([(_string(record, "text"), True)])  # every token counts in the loss, so train_on has no effect


# The prompt of Stanford Alpaca, with which its many descendants were trained too. It ends where the answer begins, so
# that generation from the prompt sees exactly the tokens of training.
ALPACA_PROMPT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
ALPACA_PROMPT_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)


def alpaca_prompt(instruction: str, material: str = "") -> str:
    """The prompt for an instruction, the same in training and generation."""
    if material:
        return ALPACA_PROMPT_WITH_INPUT.format(instruction=instruction, input=material)
    return ALPACA_PROMPT.format(instruction=instruction)


def _alpaca(record: Record, options: Options) -> Document:
    material = "" if record.fields.get("input") is None else _string(record, "input")
    prompt = alpaca_prompt(_string(record, "instruction"), material)
    return Document([(prompt, options.train_on == "all"), (_string(record, "output"), True)])


def _string(record: Record, key: str) -> str:
    value = record.fields[key]
    if not isinstance(value, str):
        raise UserMistake(
            f"{record.where}: {key} must be a string, found {type(value).__name__}. Fix the record, or set "
            "data.on_error: skip."
        )
    try:
        value.encode()
    except UnicodeEncodeError as error:  # JSON can hold a lone surrogate, which has no UTF-8 encoding
        raise UserMistake(
            f"{record.where}: {key} holds a lone surrogate at position {error.start} (an unpaired \\u escape). "
            "Fix the record, or set data.on_error: skip."
        ) from error
    return value


def _keys(record: Record) -> str:
    # Keys may be of any length, and may hold lone surrogates, which cannot be printed.
    listed = ", ".join(record.fields).encode(errors="backslashreplace").decode() or "(none)"
    return listed if len(listed) <= LONGEST_SHOWN else f"{listed[:LONGEST_SHOWN]}…"


# `auto` takes the first match, so formats with more keys come first.
FORMATS: dict[str, Format] = {
    "alpaca": Format("alpaca", ("instruction", "output"), _alpaca),
    "text": Format("text", ("text",), _text, joined=True),
}
