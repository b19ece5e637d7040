"""Documents to two files, tokens and flags, written as they come: the corpus never has to fit in memory."""

import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from shoal.data.formats import Format, Segment, choose_format, segment_row
from shoal.data.sequences import DOCUMENT, TARGET, ArrayWriter, Summary
from shoal.data.sources import Row, read_rows
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake

_CHARACTERS_AT_ONCE = 1 << 21
_ROWS_AT_ONCE = 1 << 13


class Progress:
    """Says something after two seconds, and every ten from then on: a quick preparation stays quiet."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._next = time.monotonic() + 2

    def tick(self, sentence: str) -> None:
        if time.monotonic() >= self._next:
            self._report(sentence)
            self._next = time.monotonic() + 10


@dataclass(frozen=True)
class Corpus:
    """All documents in source order, in `folder`/tokens.npy and flags.npy. `summary` knows nothing of rows yet."""

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


class _Mishaps:
    """What to do about a bad row: stop, or count it and remember the first."""

    def __init__(self, skip: bool) -> None:
        self.skip = skip
        self.count = 0
        self.first: str | None = None

    def __call__(self, mistake: UserMistake) -> None:
        if not self.skip:
            raise mistake
        self.count += 1
        self.first = self.first or str(mistake)


def tokenise(
    folder: Path,
    files: Sequence[Path],
    tokenizer: Tokenizer,
    *,
    source: str,
    format_name: str,
    train_on: str,
    skip: bool,
    progress: Progress,
) -> Corpus:
    """Read, format and tokenise every document of `files` into `folder`."""
    mishaps = _Mishaps(skip)
    rows = read_rows(source, files, mishaps)
    first = next(rows, None)
    if first is None:
        raise _nothing(files, mishaps, "no rows")
    chosen = choose_format(format_name, first)
    small = tokenizer.size <= 1 << 16
    with (
        ArrayWriter(folder / "tokens.npy", np.dtype(np.uint16 if small else np.int32)) as tokens,
        ArrayWriter(folder / "flags.npy", np.dtype(np.uint8)) as flags,
    ):
        writer = _DocumentWriter(tokenizer, tokens, flags)
        for batch in _batches(_segmented(chain([first], rows), chosen, train_on, mishaps)):
            writer.write(batch)
            progress.tick(f"Tokenising: {len(writer.lengths):,} documents, {tokens.length:,} tokens so far.")
    if not writer.lengths:
        raise _nothing(files, mishaps, "no text")
    return Corpus(
        folder,
        chosen,
        np.array(writer.lengths, dtype=np.int64),
        Summary(
            format=chosen.name,
            separate=False,
            documents=len(writer.lengths),
            tokens=tokens.length,
            rows=0,
            longest=0,
            loss_tokens=0,
            loss_token_share=0.0,
            empty=writer.empty,
            skipped=mishaps.count,
            first_skipped=mishaps.first,
        ),
    )


def _nothing(files: Sequence[Path], mishaps: _Mishaps, what: str) -> UserMistake:
    place = str(files[0]) if len(files) == 1 else f"the {len(files):,} files from {files[0]} on"
    skipped = f" ({mishaps.count:,} were skipped; the first: {mishaps.first})" if mishaps.count else ""
    return UserMistake(f"There is {what} in {place}{skipped}. Point data.path at data that has some.")


def _segmented(
    rows: Iterator[Row], chosen: Format, train_on: str, mishaps: _Mishaps
) -> Iterator[tuple[list[Segment], bool]]:
    """The segments of each good row, and whether its document goes on in the next."""
    for row in rows:
        try:
            segments = segment_row(chosen, row, train_on)
        except UserMistake as mistake:
            mishaps(mistake)
        else:
            yield segments, row.continued


def _batches(rows: Iterator[tuple[list[Segment], bool]]) -> Iterator[list[tuple[list[Segment], bool]]]:
    """As many rows as are worth one call of the tokenizer, bounded by their text."""
    batch: list[tuple[list[Segment], bool]] = []
    characters = 0
    for segments, continued in rows:
        batch.append((segments, continued))
        characters += sum(len(text) for text, _ in segments)
        if characters >= _CHARACTERS_AT_ONCE or len(batch) >= _ROWS_AT_ONCE:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _DocumentWriter:
    """Appends documents: the begin token where the tokenizer wants one, the text, the end token.

    Segments are tokenised one by one, so that a prompt has the tokens it will have when generating from it.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: ArrayWriter, flags: ArrayWriter) -> None:
        self.lengths = array("q")
        self.empty = 0
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._flags = flags
        self._open = 0  # tokens so far of a document whose last row was `continued`
        begin = tokenizer.begin if tokenizer.prepends_begin else None
        self._begin = None if begin is None else np.array([begin], dtype=np.int32)
        self._end = np.array([tokenizer.end], dtype=np.int32)

    def write(self, batch: list[tuple[list[Segment], bool]]) -> None:
        encoded = iter(self._tokenizer.encode_many([text for segments, _ in batch for text, _ in segments]))
        pieces: list[np.ndarray] = []
        trained: list[bool] = []
        firsts: list[int] = []  # where in this batch a document begins
        written = 0
        for segments, continued in batch:
            row = [(next(encoded), loss) for _, loss in segments]
            begins = not self._open
            if begins and not continued and not any(text for text, _ in segments):
                self.empty += 1
                continue
            if begins and self._begin is not None:
                row.insert(0, (self._begin, False))
            if not continued:
                row.append((self._end, segments[-1][1]))  # where the last thing said is trained on, so is stopping
            added = sum(len(ids) for ids, _ in row)
            if begins and added:
                firsts.append(written)
            for ids, loss in row:
                pieces.append(ids)
                trained.append(loss)
            written += added
            self._open += added
            if not continued:
                self.lengths.append(self._open)
                self._open = 0
        if not written:
            return
        ids = np.concatenate(pieces)
        assert ids.min() >= 0
        assert ids.max() < self._tokenizer.size
        flags = np.repeat(np.array(trained, dtype=np.uint8) * np.uint8(TARGET), [len(piece) for piece in pieces])
        flags[firsts] = DOCUMENT  # and not a target: nothing in the document stands before it
        self._tokens.append(ids)
        self._flags.append(flags)
