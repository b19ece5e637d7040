"""Formats: how a record becomes documents, whose segments of text count in the loss or are masked.

A new format is one function and one line in `FORMATS`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from shoal.catalogue.objectives import objective_facts
from shoal.data.formats.chat import read_chat
from shoal.data.formats.document import Document, Options, Segment, read_answer, read_string
from shoal.data.sources import Record
from shoal.data.sources.columns import shown_keys
from shoal.mistakes import UserMistake, suggestion

__all__ = [
    "FORMATS",
    "MAY_HAVE_CHATS",
    "Document",
    "Format",
    "Options",
    "alpaca_prompt",
    "check_keys",
    "check_pairs",
    "choose_format",
    "merge_segments",
    "read_document",
]


@dataclass(frozen=True)
class Format:
    """`needs`: the keys of a record, one of these sets in each, and how `auto` recognizes the format. `joined`:
    documents are concatenated into one stream (pretraining) rather than kept apart by the attention mask
    (instructions). `pairs`: a record is two documents, which `document` cannot be. `unpaired`: documents have labels,
    and `formats.preference` reads them too."""

    name: str
    needs: tuple[tuple[str, ...], ...]
    document: Callable[[Record, Options], Document]
    joined: bool = False
    pairs: bool = False
    unpaired: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(key for keys in self.needs for key in keys)

    @property
    def described(self) -> str:
        return " or ".join(" and ".join(keys) for keys in self.needs)

    def fits(self, record: Record) -> bool:
        return any(record.fields.keys() >= set(keys) for keys in self.needs)


def choose_format(name: str, first: Record, objective: str = "causal_lm") -> Format:
    """The format called `name`; `auto` chooses by the keys of the first record.

    A prompt and a completion that are messages are a conversation. For an `objective` on answers with labels, both
    answers of a pair have one.
    """
    unpaired = FORMATS["unpaired"]
    if objective_facts(objective).unpaired and (name == "preference" or (name == "auto" and unpaired.fits(first))):
        return unpaired
    chosen = _find_format(name, first)
    if chosen.name == "completion" and any(isinstance(first.fields.get(key), list) for key in chosen.keys):
        return FORMATS["chat"]
    return chosen


def _find_format(name: str, first: Record) -> Format:
    if name != "auto":
        if name not in FORMATS:
            raise UserMistake(
                f"data.format {name} is not supported. Supported formats: auto, {', '.join(FORMATS)}."
                + suggestion(name, FORMATS)
            )
        return FORMATS[name]
    for candidate in FORMATS.values():
        if candidate.fits(first) and not candidate.unpaired:
            return candidate
    wanted = "; ".join(f"{one.name}: {one.described}" for one in FORMATS.values())
    raise UserMistake(
        f"data.format auto does not recognize {first.where}, which has the keys {shown_keys(first)}. Say which of them "
        f"are what a format needs, as in {_example_of_columns(first)}, or set data.format. The formats need: {wanted}."
    )


def _example_of_columns(first: Record) -> str:
    """How data.columns may be set for a record with keys of its own: one text is the text, the first of several are a
    prompt and its completion."""
    texts = [key for key, value in first.fields.items() if isinstance(value, str)] or list(first.fields)
    names = ("text",) if len(texts) < 2 else ("prompt", "completion")
    pairs = ", ".join(f"{name}: {key}" for name, key in zip(names, texts, strict=False))
    return f"data.columns='{{{pairs}}}'"


def read_document(chosen: Format, record: Record, options: Options) -> Document:
    """The document of a record."""
    check_keys(chosen, record)
    return merge_segments(chosen.document(record, options))


def merge_segments(document: Document) -> Document:
    """The document with adjacent segments of the same kind as one, for tokenization."""
    merged: list[Segment] = []
    for text, trained in document.segments:
        if merged and merged[-1][1] == trained:
            merged[-1] = (merged[-1][0] + text, trained)
        else:
            merged.append((text, trained))
    return document if len(merged) == len(document.segments) else replace(document, segments=merged)


def check_keys(chosen: Format, record: Record) -> None:
    """A UserMistake if the record lacks a key that its format needs."""
    if not chosen.fits(record):
        missing = [key for key in chosen.needs[0] if key not in record.fields]
        lacking = ", ".join(missing) if len(chosen.needs) == 1 else chosen.described
        raise UserMistake(
            f"{record.where} lacks {lacking}, which data.format {chosen.name} needs; its keys are "
            f"{shown_keys(record)}. Fix the record, choose another data.format, or set data.on_error: skip."
        )


def _text(record: Record, options: Options) -> Document:
    return Document([(read_string(record, "text"), True)])  # every token counts in the loss, so train_on has no effect


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
    material = "" if record.fields.get("input") is None else read_string(record, "input")
    prompt = alpaca_prompt(read_string(record, "instruction"), material)
    return Document([(prompt, options.train_on == "all"), (read_answer(record, "output"), True)])


def _completion(record: Record, options: Options) -> Document:
    prompt = read_string(record, "prompt")
    return Document([(prompt, options.train_on == "all"), (read_answer(record, "completion"), True)])


def check_pairs(chosen: Format, objective: str) -> None:
    """A UserMistake if the records of the format are pairs and the objective is for single documents, or the other way
    round; and likewise for labels."""
    facts, unpaired = objective_facts(objective), FORMATS["unpaired"]
    if facts.unpaired and not chosen.unpaired:
        raise UserMistake(
            f"train.objective {objective} needs to know which answers are desirable, and data.format {chosen.name} "
            f"does not say: records need the keys {unpaired.described}; name yours in data.columns, or use "
            "train.objective causal_lm."
        )
    if chosen.unpaired and not facts.unpaired:
        raise UserMistake(
            f"data.format {chosen.name} has a label for each answer, which train.objective {objective} does not use; "
            "use objective apo_zero_unpaired, or data.format completion for causal_lm."
        )
    needs_pairs = facts.pairs
    if needs_pairs and not chosen.pairs:
        wanted = FORMATS["preference"]
        raise UserMistake(
            f"train.objective {objective} compares two answers, and data.format {chosen.name} has one: records need "
            f"the keys {wanted.described}, and may have prompt; name yours in data.columns, or use train.objective "
            "causal_lm."
        )
    if chosen.pairs and not needs_pairs:
        raise UserMistake(
            f"data.format {chosen.name} has pairs of answers (chosen, rejected), which train.objective {objective} "
            "cannot train on; use objective dpo, ipo, orpo or simpo, or, to train on the chosen ones, set data.format: "
            "completion and data.columns: {completion: chosen}, or data.format: chat and data.columns: {messages: "
            "chosen}."
        )


def _pair(record: Record, options: Options) -> Document:
    raise AssertionError("formats.preference reads these records, which may have two documents")


# `auto` takes the first match, so formats with more keys come first.
FORMATS: dict[str, Format] = {
    "alpaca": Format("alpaca", (("instruction", "output"),), _alpaca),
    "preference": Format("preference", (("chosen", "rejected"),), _pair, pairs=True),
    "unpaired": Format("unpaired", (("prompt", "completion", "label"), ("chosen", "rejected")), _pair, unpaired=True),
    "completion": Format("completion", (("prompt", "completion"),), _completion),
    "chat": Format("chat", (("messages",), ("conversations",), ("prompt", "completion")), read_chat),
    "text": Format("text", (("text",),), _text, joined=True),
}

MAY_HAVE_CHATS = ("auto", "chat", "completion", "preference", "unpaired")  # values of data.format
