"""Records to a folder of prepared sequences: tokenize, split or truncate, pack."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.data import pack
from shoal.data.cache import Report
from shoal.data.formats import Options
from shoal.data.sequences import LOSS_TOKEN, ArrayWriter, hash_sequences, write_array, write_summary
from shoal.data.sources import Record
from shoal.data.tokenize import Corpus, Errors, Progress, tokenize_records
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake

_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Settings:
    """What determines the sequences, besides the files and the tokenizer. All of it is part of the cache key."""

    source: str
    format: str
    max_length: int
    pack: bool  # documents that are joined to one stream
    pack_apart: bool  # documents that must not attend to each other
    train_on: str
    on_error: str


def write_sequences(
    folder: Path,
    settings: Settings,
    records: Iterator[Record],
    tokenizer: Tokenizer,
    *,
    errors: Errors,
    report: Report,
    where: str,
    key: str,
    not_apart: str | None = None,
) -> None:
    """Write the sequences of `records` into `folder`, for `open_sequences`.

    `errors` is what the reader of `records` calls for a bad one. Messages say that the records are in `where`, which
    the config's `key` names. `not_apart` is the reason if the model cannot keep packed documents apart.
    """
    progress = Progress(report)
    corpus = tokenize_records(
        folder,
        records,
        tokenizer,
        format_name=settings.format,
        options=Options(settings.train_on),
        errors=errors,
        progress=progress,
        where=where,
        key=key,
        not_apart=not_apart if settings.pack_apart else None,
    )
    length = settings.max_length
    separate = settings.pack_apart and not corpus.format.joined
    if settings.pack and corpus.format.joined:
        bounds = pack.split_stream(corpus.tokens, length)
    else:
        bounds = pack.split_documents(corpus.lengths, length, split=corpus.format.joined)
    loss_tokens = count_loss_tokens(corpus.load("flags"), bounds)
    kept = loss_tokens > 0
    if not kept.any():
        raise UserMistake(
            f"None of the {corpus.documents:,} documents in {key} has a loss token"
            + (
                f": {bounds.truncated:,} were truncated at data.max_length {length}. Raise it."
                if bounds.truncated
                else "."
            )
        )
    starts, ends, loss_tokens = bounds.starts[kept], bounds.ends[kept], loss_tokens[kept]
    if separate:
        starts, ends, loss_tokens = _write_packed(corpus, starts, ends, loss_tokens, length + 1, progress)
    write_array(folder / "starts.npy", starts)
    write_array(folder / "ends.npy", ends)
    write_array(folder / "loss_tokens.npy", loss_tokens.astype(np.int32))
    trained = int(loss_tokens.sum(dtype=np.int64))
    write_summary(
        folder,
        replace(
            corpus.summary,
            separate=separate,
            sequences=len(starts),
            longest=int((ends - starts).max()) - 1,
            loss_tokens=trained,
            loss_token_share=trained / int((ends - starts - 1).sum()),
            content=hash_sequences(folder),
            truncated=bounds.truncated,
            dropped=int(np.sum(~kept)),
        ),
    )


def count_loss_tokens(flags: np.ndarray, bounds: pack.Bounds) -> np.ndarray:
    """The loss tokens of each sequence. Its first token is not counted: no input precedes it."""
    counts = np.zeros(len(bounds.starts), dtype=np.int64)
    first = 0
    while first < len(counts):
        # Sequences are in token order, so all within a block of the file are counted at once.
        limit = bounds.starts[first] + _TOKENS_AT_ONCE
        last = max(int(np.searchsorted(bounds.ends, limit, side="right")), first + 1)
        starts, ends = bounds.starts[first:last], bounds.ends[first:last]
        marked = np.asarray(flags[starts[0] : ends[-1]]) & LOSS_TOKEN
        before = np.concatenate([[0], np.cumsum(marked, dtype=np.int64)])
        counts[first:last] = before[ends - starts[0]] - before[np.minimum(starts + 1, ends) - starts[0]]
        first = last
    return counts


def _write_packed(
    corpus: Corpus, starts: np.ndarray, ends: np.ndarray, loss_tokens: np.ndarray, capacity: int, progress: Progress
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rewrite the documents in packing order, so that each sequence is contiguous in the file."""
    packing = pack.fit_documents(ends - starts, capacity)
    starts, lengths = starts[packing.order], (ends - starts)[packing.order]
    after = np.cumsum(lengths)
    for name in ("tokens", "flags"):
        values = corpus.load(name)
        unpacked = corpus.folder / f"{name}.npy"
        packed = corpus.folder / f"{name}-packed.npy"
        with ArrayWriter(packed, values.dtype) as writer:
            first = 0
            while first < len(starts):
                done = writer.length
                last = max(int(np.searchsorted(after, done + _TOKENS_AT_ONCE, side="right")), first + 1)
                here = lengths[first:last]
                shift = starts[first:last] - (after[first:last] - here - done)
                writer.append(values[np.repeat(shift, here) + np.arange(int(here.sum()))])
                first = last
                progress.tick(f"Packing: {writer.length:,} of {after[-1]:,} tokens.")
        packed.replace(unpacked)
    last_documents = np.cumsum(packing.counts)
    packed_ends = after[last_documents - 1]
    packed_starts = np.concatenate([[0], packed_ends[:-1]])
    packed_loss_tokens = np.add.reduceat(loss_tokens[packing.order], last_documents - packing.counts)
    return packed_starts, packed_ends, packed_loss_tokens
