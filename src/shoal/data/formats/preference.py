"""The formats of preference tuning. `preference`: a chosen and a rejected answer to the same prompt, as two documents;
`unpaired`: an answer and its label, which says whether it is desirable."""

from dataclasses import replace

from shoal.data.formats.chat import render_conversation
from shoal.data.formats.choose import FORMATS, Format, check_keys, merge_segments, read_document
from shoal.data.formats.conversation import Message, conversation, read_messages
from shoal.data.formats.document import REMEDY, Document, Options, read_answer, read_class, read_string
from shoal.data.sources import Record
from shoal.mistakes import UserMistake, shortened

LABELS = {"true": True, "1": True, "false": False, "0": False}


def read_documents(chosen: Format, record: Record, options: Options) -> tuple[Document, ...]:
    """The documents of a record: one, or the two of a pair."""
    if chosen.unpaired:
        return read_labelled(record, options)
    if chosen.pairs:
        return read_pair(record, options)
    document = read_document(chosen, record, options)
    return (document if options.label is None else replace(document, label=read_class(record, options.label)),)


def read_pair(record: Record, options: Options) -> tuple[Document, Document]:
    """The chosen and the rejected document of a record. Each answer is text or messages, the prompt may be either, or
    be left out: then it is what both have in common."""
    check_keys(FORMATS["preference"], record)
    if record.fields["chosen"] == record.fields["rejected"]:
        raise UserMistake(f"{record.where}: chosen and rejected are the same. {REMEDY}")
    if any(isinstance(record.fields[key], list) for key in ("chosen", "rejected")):
        return _conversations(record, options)
    chosen, rejected = read_answer(record, "chosen"), read_answer(record, "rejected")
    if record.fields.get("prompt") is None:
        shared = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
    elif isinstance(record.fields["prompt"], list):
        return _conversations(record, options)
    else:
        prompt = read_string(record, "prompt")
    trained = options.train_on == "all"
    first, second = (merge_segments(Document([(prompt, trained), (answer, True)])) for answer in (chosen, rejected))
    return first, second


def read_labelled(record: Record, options: Options) -> tuple[Document, ...]:
    """The document of a record with its label; or both of a pair, the chosen one with the label true."""
    check_keys(FORMATS["unpaired"], record)
    if "label" not in record.fields:
        chosen, rejected = read_pair(record, options)
        return replace(chosen, desirable=True), replace(rejected, desirable=False)
    messages = any(isinstance(record.fields[key], list) for key in ("prompt", "completion"))
    document = read_document(FORMATS["chat" if messages else "completion"], record, options)
    return (replace(document, desirable=_read_label(record)),)


def _read_label(record: Record) -> bool:
    """As JSON or a column of integers has it, or as CSV does."""
    value = record.fields["label"]
    found = LABELS.get(str(value).strip().lower())
    if found is None:
        raise UserMistake(
            f"{record.where}: label must be true (a desirable answer) or false, found {shortened(str(value))}. {REMEDY}"
        )
    return found


def _shared(chosen: str, rejected: str) -> int:
    """The length of the prompt that both begin with: up to a white space, so that no word is divided."""
    pairs = zip(chosen, rejected, strict=False)
    length = next((index for index, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected)))
    return next((index for index in range(length - 1, -1, -1) if chosen[index].isspace()), 0)


def _conversations(record: Record, options: Options) -> tuple[Document, Document]:
    chosen, rejected = (read_messages(record, key, "assistant") for key in ("chosen", "rejected"))
    if record.fields.get("prompt") is not None:
        prompt = read_messages(record, "prompt", "user")
        chosen, rejected = _after(prompt, chosen), _after(prompt, rejected)
        given = len(prompt)
    else:
        pairs = zip(chosen, rejected, strict=False)
        given = next(
            (index for index, (one, other) in enumerate(pairs) if one != other), min(len(chosen), len(rejected))
        )
    first, second = (
        render_conversation(record, conversation(record, messages, given), options) for messages in (chosen, rejected)
    )
    return first, second


def _after(prompt: list[Message], answer: list[Message]) -> list[Message]:
    """The answer after the prompt, which many datasets repeat in each answer."""
    return answer if answer[: len(prompt)] == prompt else prompt + answer
