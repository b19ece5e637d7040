"""Tokenize records into two files, tokens and flags. Streaming: the corpus never has to fit in memory."""

from array import array
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path

import numpy as np

from shoal.data import workers
from shoal.data.encode import Encoded, encode
from shoal.data.formats.chat_template import no_template
from shoal.data.formats.choose import Document, Format, Options, check_pairs, choose_format
from shoal.data.formats.preference import read_documents
from shoal.data.progress import Progress
from shoal.data.sequences import ArrayWriter, Summary, load_array
from shoal.data.sources import Record
from shoal.data.tokenizer_base import Tokenizer, disable_threads
from shoal.mistakes import UserMistake

_CHARACTERS_AT_ONCE = 1 << 17
_RECORDS_AT_ONCE = 1 << 12

# Smaller data is tokenized in this process: starting others takes as long.
WORTH_WORKERS = 1 << 21  # characters


class NothingToLearn(UserMistake):
    """No record has a token that the loss counts."""


@dataclass(frozen=True)
class Corpus:
    """All documents in source order, in `folder`/tokens.npy and flags.npy. `summary` has no sequences yet."""

    folder: Path
    format: Format
    lengths: np.ndarray  # tokens of each document
    summary: Summary
    labels: list[str] = field(default_factory=list)  # the class of each document, if they have one

    @property
    def documents(self) -> int:
        return self.summary.documents

    def load(self, name: str) -> np.ndarray:
        return load_array(self.folder / f"{name}.npy")


class Errors:
    """data.on_error, for the reader of records to call: raise the first mistake, or skip and count.

    Mistakes of the reader wait in `unread` until the records before them are formatted, which may fail too: `first` is
    the first in the order of the records.
    """

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: str | None = None
        self.unread: list[str] = []

    def __call__(self, mistake: UserMistake) -> None:
        if not self.skip:
            raise mistake
        self.unread.append(str(mistake))

    def take(self) -> "list[Mistake]":
        taken = [Mistake(message) for message in self.unread]
        self.unread.clear()
        return taken

    def add(self, messages: list[str], count: int) -> None:
        self.count += count
        if self.first is None and messages:
            self.first = messages[0]


@dataclass(frozen=True, slots=True)
class Mistake:
    """A place in the data where reading failed; `ends`: nothing can be read after it."""

    message: str
    ends: bool = False


@dataclass(slots=True)
class Batch:
    """Records that are tokenized together, with the mistakes of reading between them."""

    items: list[Record | Mistake]
    continues: bool = False  # the first record continues a document of the previous batch
    characters: int = 0
    share: float | None = None  # of the data that has been read with its last record


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The tokens of a batch. `stopped`: the mistake that ends the preparation; then there are no tokens."""

    encoded: Encoded | None
    mistakes: int = 0
    first: list[str] = field(default_factory=list)
    stopped: str | None = None
    share: float | None = None  # as of the batch


@dataclass(frozen=True)
class BatchTokenizer:
    """Formats and tokenizes batches: a pure function, in this process or in a worker."""

    tokenizer: Tokenizer
    format: Format
    options: Options
    skip: bool
    dtype: np.dtype

    def __call__(self, batch: Batch) -> Tokenized:
        documents: list[Document] = []
        mistakes: list[str] = []
        continues = batch.continues
        for item in batch.items:
            if isinstance(item, Mistake):
                if item.ends:
                    return Tokenized(None, stopped=item.message)
                mistakes.append(item.message)
                continue
            try:
                found = read_documents(self.format, item, self.options)
            except UserMistake as mistake:
                if not self.skip:
                    return Tokenized(None, stopped=str(mistake))
                mistakes.append(str(mistake))
            else:
                if continues or item.continued:
                    found = tuple(replace(one, continues=continues, continued=item.continued) for one in found)
                documents += found
            continues = item.continued
        encoded = encode(self.tokenizer, documents, keep_empty=self.format.pairs, encoder=self.options.encoder)
        compact = replace(encoded, ids=encoded.ids.astype(self.dtype))
        return Tokenized(compact, len(mistakes), mistakes[:1], share=batch.share)


def tokenize_records(
    folder: Path,
    records: Iterator[Record],
    tokenizer: Tokenizer,
    *,
    format_name: str,
    options: Options,
    errors: Errors,
    progress: Progress,
    where: str,
    key: str,
    sizes: Mapping[Path, int] | None = None,
    objective: str = "causal_lm",
    check: Callable[[Format], None] = lambda chosen: None,
) -> Corpus:
    """Format and tokenize every record into `folder`, with worker processes if there is much text and more than one
    core; the result does not depend on their number.

    `sizes` has the bytes of each file, in order, and tells how long it takes. `check` may refuse the format.
    """
    first = next(records, None)
    if first is None:
        errors.add(errors.unread[:1], len(errors.unread))
        raise _nothing(where, errors, "no record", key)
    chosen = choose_format(format_name, first, objective)
    check_pairs(chosen, objective)
    if chosen.name == "chat" and options.template is None:
        raise no_template(tokenizer.name)
    check(chosen)
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.int32)
    work = BatchTokenizer(tokenizer, chosen, options, errors.skip, dtype)
    batches = _batches(chain([first], records), errors, _Place(sizes or {}))
    with (
        ArrayWriter(folder / "tokens.npy", dtype) as tokens,
        ArrayWriter(folder / "flags.npy", np.dtype(np.uint8)) as flags,
        closing(_tokenize(work, batches)) as tokenized,
    ):
        writer = _Writer(tokens, flags)
        progress.begin()
        for one in tokenized:
            if one.encoded is None:
                raise UserMistake(one.stopped)
            errors.add(one.first, one.mistakes)
            writer.write(one.encoded)
            progress.tick("Tokenizing", len(writer.lengths), "examples", one.share)
        if options.encoder:  # see `pack.split_examples`
            tokens.append(np.array([tokenizer.end]))
            flags.append(np.zeros(1))
    if not writer.lengths:
        raise _nothing(where, errors, "no text", key)
    return Corpus(
        folder,
        chosen,
        np.array(writer.lengths, dtype=np.int64),
        Summary(
            format=chosen.name,
            joined=chosen.joined,
            separate=False,
            documents=len(writer.lengths),
            tokens=sum(writer.lengths),
            sequences=0,
            longest=0,
            loss_tokens=0,
            loss_token_share=0.0,
            content="",
            empty=writer.empty,
            skipped=errors.count,
            first_skipped=errors.first,
        ),
        writer.labels,
    )


def _nothing(where: str, errors: Errors, what: str, key: str) -> NothingToLearn:
    # What to do about one bad record is no help where nothing is left.
    first = (errors.first or "").partition(". ")[0].rstrip(".")
    skipped = f" (skipped: {errors.count:,}; the first: {first})" if errors.count else ""
    return NothingToLearn(f"There is {what} in {where}{skipped}. Check {key}.")


def _tokenize(work: BatchTokenizer, batches: Iterator[Batch]) -> Generator[Tokenized, None, None]:
    """The tokens of each batch, in order."""
    begun: list[Batch] = []
    characters = 0
    while (characters < WORTH_WORKERS or len(begun) < 2) and (batch := next(batches, None)) is not None:
        begun.append(batch)
        characters += batch.characters
    every = chain(begun, batches)
    many = characters >= WORTH_WORKERS and len(begun) > 1
    if many and (count := workers.choose_workers()):
        yield from workers.map_in_order(work, every, count, disable_threads)
    else:
        yield from map(work, every)


class _Place:
    """How much of the data lies before a record, as a share of all bytes."""

    def __init__(self, sizes: Mapping[Path, int]) -> None:
        self._total = sum(sizes.values())
        self._before = dict(zip(sizes, accumulate(sizes.values(), initial=0), strict=False))

    def share(self, record: Record) -> float | None:
        before = self._before.get(record.file)
        return None if before is None else (before + record.read) / max(self._total, 1)


def _batches(records: Iterator[Record], errors: Errors, place: _Place) -> Iterator[Batch]:
    """Records grouped for one call of the tokenizer, bounded in number and characters."""
    batch = Batch([])
    while True:
        try:
            record = next(records, None)
        except UserMistake as mistake:  # reported once the records before it are formatted: they may have mistakes too
            batch.items += [*errors.take(), Mistake(str(mistake), ends=True)]
            break
        if errors.unread:
            batch.items += errors.take()
        if record is None:
            break
        batch.items.append(record)
        for value in record.fields.values():
            batch.characters += len(value) if isinstance(value, str) else _characters(value)
        if batch.characters >= _CHARACTERS_AT_ONCE or len(batch.items) >= _RECORDS_AT_ONCE:
            batch.share = place.share(record)
            yield batch
            batch = Batch([], continues=record.continued)
    if batch.items:
        yield batch


def _characters(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_characters, value.values()))
    if isinstance(value, list | tuple):
        return sum(map(_characters, value))
    return getattr(value, "size", 1)  # of an array of token ids


class _Writer:
    """Appends encoded batches to the files, and keeps the lengths of documents."""

    def __init__(self, tokens: ArrayWriter, flags: ArrayWriter) -> None:
        self.lengths = array("q")
        self.labels: list[str] = []
        self.empty = 0
        self._tokens = tokens
        self._flags = flags
        self._open = 0  # tokens so far of a document that the next part continues

    def write(self, batch: Encoded) -> None:
        self.empty += batch.empty
        self.labels += batch.labels
        self._tokens.append(batch.ids)
        self._flags.append(batch.flags)
        for length, continued in zip(batch.lengths.tolist(), batch.continued.tolist(), strict=True):
            self._open += length
            if not continued:
                self.lengths.append(self._open)
                self._open = 0
