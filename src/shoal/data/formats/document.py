"""A document as text, what the user chose about documents, and how fields of a record are read."""

from dataclasses import dataclass

from shoal.data.formats.chat_template import ChatTemplate
from shoal.data.sources import Record
from shoal.mistakes import UserMistake, suggestion

Segment = tuple[str, bool]  # the text, and whether the loss counts it

REMEDY = "Fix the record, or set data.on_error: skip."


@dataclass(slots=True)  # not frozen, as a record
class Document:
    """A document as text. Its segments are tokenized separately, so that a prompt has the same tokens as in generation,
    or as one text (`whole`), as a chat template is."""

    segments: list[Segment]
    whole: bool = False
    begin: bool = True  # the tokenizer's begin token is prepended, if it does so
    end: bool = True  # the end token is appended
    continues: bool = False  # a document that the previous one of its file began
    continued: bool = False  # by the next
    desirable: bool | None = None  # the label of its answer, if it has one
    label: str | None = None  # the name of its class, if examples have one


@dataclass(frozen=True)
class Options:
    """What the user chose about the content of documents. `template`: None if the tokenizer has none either."""

    train_on: str = "answers"
    template: ChatTemplate | None = None
    label: str | None = None  # `data.label`: the field with the class of an example
    encoder: bool = False  # every document starts with the begin token, and any token of its text may be predicted


def read_string(record: Record, key: str) -> str:
    """The field called `key`, which must be text."""
    value = record.fields[key]
    if not isinstance(value, str):
        found = "null" if value is None else type(value).__name__
        raise UserMistake(f"{record.where}: {key} must be a string, found {found}. {REMEDY}")
    check_unicode(record, key, value)
    return value


def read_class(record: Record, key: str) -> str:
    """The name of the class in the field called `key`: text, a number, or true or false."""
    if key not in record.fields:
        raise UserMistake(
            f"data.label is {key}, but {record.where} has only {', '.join(record.fields) or 'no fields'}."
            f"{suggestion(key, record.fields)}"
        )
    value = record.fields[key]
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float) or value == "":
        found = "empty" if value in (None, "") else f"a {type(value).__name__}"
        raise UserMistake(f"{record.where}: the label {key} is {found}; it must be text or a number. {REMEDY}")
    return str(value)


def read_answer(record: Record, key: str) -> str:
    """The field called `key`, which must be text that is not blank."""
    value = read_string(record, key)
    if not value or value.isspace():
        raise UserMistake(f"{record.where}: {key} is empty, so there is no answer to learn. {REMEDY}")
    return value


def check_unicode(record: Record, what: str, text: str) -> None:
    if text.isascii():  # known without reading it
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can hold a lone surrogate, which has no UTF-8 encoding
        raise UserMistake(
            f"{record.where}: {what} holds a lone surrogate at position {error.start} (an unpaired \\u escape). "
            f"{REMEDY}"
        ) from error
