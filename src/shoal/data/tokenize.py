"""Tokenize documents into two files, tokens and flags. Streaming: the corpus never has to fit in memory."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from shoal.data.formats import Format, Segment, choose_format, segment_record
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN, ArrayWriter, Summary
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
    train_on: str,
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
    if not_apart is not None and not chosen.joined:
        raise cannot_pack(not_apart)
    small = tokenizer.size <= 1 << 16
    with (
        ArrayWriter(folder / "tokens.npy", np.dtype(np.uint16 if small else np.int32)) as tokens,
        ArrayWriter(folder / "flags.npy", np.dtype(np.uint8)) as flags,
    ):
        writer = _DocumentWriter(tokenizer, tokens, flags)
        for batch in _batches(_segmented(chain([first], records), chosen, train_on, errors)):
            writer.write(batch)
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


def _segmented(
    records: Iterator[Record], chosen: Format, train_on: str, errors: _ErrorPolicy
) -> Iterator[tuple[list[Segment], bool]]:
    """The segments of each valid record, and whether its document continues in the next."""
    for record in records:
        try:
            segments = segment_record(chosen, record, train_on)
        except UserMistake as mistake:
            errors(mistake)
        else:
            yield segments, record.continued


def _batches(records: Iterator[tuple[list[Segment], bool]]) -> Iterator[list[tuple[list[Segment], bool]]]:
    """Records grouped for one call of the tokenizer, bounded in number and characters."""
    batch: list[tuple[list[Segment], bool]] = []
    characters = 0
    for segments, continued in records:
        batch.append((segments, continued))
        characters += sum(len(text) for text, _ in segments)
        if characters >= _CHARACTERS_AT_ONCE or len(batch) >= _RECORDS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _DocumentWriter:
    """Appends documents: the begin token where the tokenizer prepends one, the text, the end token.

    Segments are tokenized separately, so that a prompt has the same tokens as in generation.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: ArrayWriter, flags: ArrayWriter) -> None:
        self.lengths = array("q")
        self.empty = 0
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._flags = flags
        self._open = 0  # tokens so far of a document whose last record was `continued`
        begin = tokenizer.begin if tokenizer.prepends_begin else None
        self._begin = None if begin is None else np.array([begin], dtype=np.int32)
        self._end = np.array([tokenizer.end], dtype=np.int32)

    def write(self, batch: list[tuple[list[Segment], bool]]) -> None:
        encoded = iter(self._tokenizer.encode_many([text for segments, _ in batch for text, _ in segments]))
        parts: list[np.ndarray] = []
        trained: list[bool] = []
        firsts: list[int] = []  # where documents begin in this batch
        written = 0
        for segments, continued in batch:
            encodings = [(next(encoded), loss) for _, loss in segments]
            begins = not self._open
            if begins and not continued and not any(text for text, _ in segments):
                self.empty += 1
                continue
            if begins and self._begin is not None:
                encodings.insert(0, (self._begin, False))
            if not continued:
                encodings.append((self._end, segments[-1][1]))  # the end token is a loss token if the last segment is
            added = sum(len(ids) for ids, _ in encodings)
            if begins and added:
                firsts.append(written)
            for ids, loss in encodings:
                parts.append(ids)
                trained.append(loss)
            written += added
            self._open += added
            if not continued:
                self.lengths.append(self._open)
                self._open = 0
        if not written:
            return
        ids = np.concatenate(parts)
        assert ids.min() >= 0
        assert ids.max() < self._tokenizer.size
        flags = np.repeat(np.array(trained, dtype=np.uint8) * np.uint8(LOSS_TOKEN), [len(part) for part in parts])
        flags[firsts] = DOCUMENT  # and not a loss token: no input of the document precedes it
        self._tokens.append(ids)
        self._flags.append(flags)
