"""Tokenize documents into two files, tokens and flags. Streaming: the corpus never has to fit in memory."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from shoal.data.chat_template import no_template
from shoal.data.encode import Encoded, encode
from shoal.data.formats import Document, Format, Options, choose_format, read_document, refuse_pairs
from shoal.data.sequences import ArrayWriter, Summary
from shoal.data.sources import Record, read_records
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake

_CHARACTERS_AT_ONCE = 1 << 21
_RECORDS_AT_ONCE = 1 << 13


class Progress:
    """Reports after two seconds and then every ten: a quick preparation prints nothing."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._next = time.monotonic() + 2

    def tick(self, sentence: str) -> None:
        if time.monotonic() >= self._next:
            self._report(sentence)
            self._next = time.monotonic() + 10


@dataclass(frozen=True)
class Corpus:
    """All documents in source order, in `folder`/tokens.npy and flags.npy. `summary` has no sequences yet."""

    folder: Path
    format: Format
    lengths: np.ndarray  # tokens of each document
    summary: Summary

    @property
    def documents(self) -> int:
        return self.summary.documents

    @property
    def tokens(self) -> int:
        return self.summary.tokens

    def load(self, name: str) -> np.ndarray:
        loaded: np.ndarray = np.load(self.folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
        return loaded


class _ErrorPolicy:
    """data.on_error: raise the first mistake, or count mistakes and keep the first."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: str | None = None

    def __call__(self, mistake: UserMistake) -> None:
        if not self.skip:
            raise mistake
        self.count += 1
        self.first = self.first or str(mistake)


def tokenize_files(
    folder: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    source: str,
    format_name: str,
    options: Options,
    skip: bool,
    progress: Progress,
    key: str,
    not_apart: str | None = None,
) -> Corpus:
    """Read, format and tokenize every document of `files`, which `key` names, into `folder`. `not_apart`: why documents
    that are not joined to one stream are refused."""
    errors = _ErrorPolicy(skip)
    records = read_records(source, files, errors)
    first = next(records, None)
    if first is None:
        raise _nothing(files, errors, "no record", key)
    chosen = choose_format(format_name, first)
    refuse_pairs(chosen)
    if chosen.name == "chat" and options.template is None:
        raise no_template(tokenizer.name)
    if not_apart is not None and not chosen.joined:
        raise cannot_pack(not_apart)
    small = tokenizer.size <= 1 << 16
    with (
        ArrayWriter(folder / "tokens.npy", np.dtype(np.uint16 if small else np.int32)) as tokens,
        ArrayWriter(folder / "flags.npy", np.dtype(np.uint8)) as flags,
    ):
        writer = _Writer(tokens, flags)
        for batch in _batches(_documents(chain([first], records), chosen, options, errors)):
            writer.write(encode(tokenizer, batch))
            progress.tick(f"Tokenizing: {len(writer.lengths):,} documents, {tokens.length:,} tokens so far.")
    if not writer.lengths:
        raise _nothing(files, errors, "no text", key)
    return Corpus(
        folder,
        chosen,
        np.array(writer.lengths, dtype=np.int64),
        Summary(
            format=chosen.name,
            joined=chosen.joined,
            separate=False,
            documents=len(writer.lengths),
            tokens=tokens.length,
            sequences=0,
            longest=0,
            loss_tokens=0,
            loss_token_share=0.0,
            content="",
            empty=writer.empty,
            skipped=errors.count,
            first_skipped=errors.first,
        ),
    )


def cannot_pack(reason: str) -> UserMistake:
    return UserMistake(f"data.pack is true, but {reason}; set data.pack: false, or leave it out.")


def _nothing(files: Sequence[Path], errors: _ErrorPolicy, what: str, key: str) -> UserMistake:
    where = str(files[0]) if len(files) == 1 else f"the {len(files):,} files starting with {files[0]}"
    skipped = f" ({errors.count:,} were skipped; the first: {errors.first})" if errors.count else ""
    return UserMistake(f"There is {what} in {where}{skipped}. Check {key}.")


def _documents(records: Iterator[Record], chosen: Format, options: Options, errors: _ErrorPolicy) -> Iterator[Document]:
    """The documents of the valid records."""
    continues = False
    for record in records:
        try:
            document = read_document(chosen, record, options)
        except UserMistake as mistake:
            errors(mistake)
        else:
            yield replace(document, continues=continues, continued=record.continued)
            continues = record.continued


def _batches(documents: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents grouped for one call of the tokenizer, bounded in number and characters."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(len(text) for text, _ in document.segments)
        if characters >= _CHARACTERS_AT_ONCE or len(batch) >= _RECORDS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Writer:
    """Appends encoded batches to the files, and keeps the lengths of documents."""

    def __init__(self, tokens: ArrayWriter, flags: ArrayWriter) -> None:
        self.lengths = array("q")
        self.empty = 0
        self._tokens = tokens
        self._flags = flags
        self._open = 0  # tokens so far of a document that the next part continues

    def write(self, batch: Encoded) -> None:
        self.empty += batch.empty
        self._tokens.append(batch.ids)
        self._flags.append(batch.flags)
        for length, continued in zip(batch.lengths.tolist(), batch.continued.tolist(), strict=True):
            self._open += length
            if not continued:
                self.lengths.append(self._open)
                self._open = 0
