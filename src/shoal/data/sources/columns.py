"""`data.columns`: the names of the data for the names that the formats use."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from shoal.data.sources.record import OnBad, Record
from shoal.mistakes import UserMistake, shortened, suggestion

# The keys that formats read from a record.
KNOWN = (
    "text",
    "instruction",
    "input",
    "output",
    "prompt",
    "completion",
    "messages",
    "conversations",
    "tools",
    "system",
    "chosen",
    "rejected",
    "label",
)


def check_columns(columns: Mapping[str, str]) -> None:
    """A UserMistake if a name on the left side is not one of a format."""
    for name in columns:
        if name not in KNOWN:
            raise UserMistake(
                f"data.columns has {name}, which no format reads; write {{format's name: data's name}}, with the "
                f"format's name one of {', '.join(KNOWN)}." + suggestion(name, KNOWN)
            )


def rename_columns(records: Iterator[Record], columns: Mapping[str, str], on_bad: OnBad) -> Iterator[Record]:
    """The records with the names of the formats. Columns that are not in `columns` keep their names."""
    renamed = frozenset(columns.values())
    for record in records:
        fields = record.fields
        missing = [name for name in columns.values() if name not in fields]
        if missing:
            on_bad(
                UserMistake(
                    f"{record.where} has no {missing[0]}, which data.columns names; its columns are "
                    f"{shown_keys(record)}. Fix data.columns, or set data.on_error: skip."
                )
            )
            continue
        others = {name: value for name, value in fields.items() if name not in renamed}
        yield replace(record, fields={**others, **{ours: fields[theirs] for ours, theirs in columns.items()}})


def shown_keys(record: Record) -> str:
    """The keys of a record, for a message."""
    return shortened(", ".join(record.fields)) or "(none)"
