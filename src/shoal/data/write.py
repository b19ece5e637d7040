"""Records to a folder of prepared sequences: tokenize, split or truncate, pack."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shoal.data import pack
from shoal.data.cache import Report
from shoal.data.formats.choose import Format, Options
from shoal.data.labels import number_classes
from shoal.data.progress import Progress
from shoal.data.rewrite import count_loss_tokens, rewrite, write_packed
from shoal.data.sequences import (
    DESIRABLE,
    DOCUMENT_LENGTHS,
    LABELS,
    Summary,
    hash_sequences,
    write_array,
    write_summary,
)
from shoal.data.settings import Settings
from shoal.data.sources import Record
from shoal.data.tokenize import Corpus, Errors, NothingToLearn, tokenize_records
from shoal.data.tokenizer_base import Tokenizer


def write_sequences(
    folder: Path,
    settings: Settings,
    records: Iterator[Record],
    tokenizer: Tokenizer,
    *,
    options: Options,
    errors: Errors,
    report: Report,
    where: str,
    key: str,
    not_apart: str | None = None,
    sizes: Mapping[Path, int] | None = None,
) -> None:
    """Write the sequences of `records` into `folder`, for `open_sequences`.

    `errors` is what the reader of `records` calls for a bad one. Messages say that the records are in `where`, which
    the config's `key` names. `not_apart` is the reason if the model cannot keep packed documents apart. `sizes`: the
    bytes of the files, in order, to report how long it takes.
    """

    def check(chosen: Format) -> None:
        settings.refuse(chosen.joined, not_apart)
        settings.refuse_contradictions(chosen.joined)

    progress = Progress(report)
    corpus = tokenize_records(
        folder,
        records,
        tokenizer,
        format_name=settings.format,
        options=options,
        errors=errors,
        progress=progress,
        where=where,
        key=key,
        sizes=sizes,
        objective=settings.objective,
        check=check,
    )
    progress.begin()
    chosen = _choose(corpus, settings, key, progress)
    summary, starts, ends, loss_tokens = chosen.summary, chosen.starts, chosen.ends, chosen.loss_tokens
    if summary.separate and not chosen.stream:
        per_unit = 2 if settings.pairs else 1
        packing = pack.pack_units(ends - starts, settings.max_length + 1, per_unit, together=settings.pack_apart)
        starts, ends, loss_tokens = write_packed(corpus, starts, ends, loss_tokens, packing, progress)
    if settings.label is not None:
        firsts = np.cumsum(corpus.lengths) - corpus.lengths
        names = [corpus.labels[one] for one in np.searchsorted(firsts, starts).tolist()]
        classes, numbers = number_classes(names, settings.classes, key)
        write_array(folder / LABELS, numbers)
        summary = replace(summary, classes=classes)
    write_array(folder / DOCUMENT_LENGTHS, corpus.lengths)
    write_array(folder / "starts.npy", starts)
    write_array(folder / "ends.npy", ends)
    write_array(folder / "loss_tokens.npy", loss_tokens.astype(np.int32))
    trained, inputs = int(loss_tokens.sum(dtype=np.int64)), int((ends - starts - 1).sum())
    packed = chosen.stream or (summary.separate and settings.pack_apart)
    write_summary(
        folder,
        replace(
            summary,
            sequences=len(starts),
            longest=int((ends - starts).max()) - 1,
            loss_tokens=trained,
            loss_token_share=trained / inputs,
            filled=inputs / (len(starts) * settings.max_length) if packed else None,
            content=hash_sequences(folder),
        ),
    )


@dataclass(frozen=True)
class _Chosen:
    """The documents, or parts of a stream of documents, that have something to learn."""

    summary: Summary
    stream: bool  # documents are joined to one
    starts: np.ndarray
    ends: np.ndarray
    loss_tokens: np.ndarray


def _choose(corpus: Corpus, settings: Settings, key: str, progress: Progress) -> _Chosen:
    """Split, truncate or drop what is too long, and drop what has no loss token."""
    joined, length = corpus.format.joined, settings.max_length
    stream = settings.pack and joined
    separate = settings.document_mask if stream else (settings.pack_apart or settings.of_answers) and not joined
    long = pack.rule_for_long(settings.long_documents, joined and settings.label is None)
    bounds, affected = _bounds(corpus, length, long, stream, progress, encoder=settings.encoder)
    counted = replace(bounds, ends=bounds.ends - 1) if settings.encoder else bounds  # inputs, or labels
    loss_tokens = count_loss_tokens(corpus.load("flags"), counted)
    kept = loss_tokens > (-1 if settings.label is not None else 0)
    if settings.pairs:
        kept = kept.reshape(-1, 2).all(axis=1).repeat(2)  # both prompts whole, and something of both answers
    summary = replace(
        corpus.summary,
        separate=separate,
        truncated=affected if long == "truncate" else 0,
        split=affected if long == "split" else 0,
        too_long=affected if long == "drop" else 0,
        dropped=int(np.sum(~kept)) // (2 if settings.pairs else 1),
        pairs=settings.pairs,
        encoder=settings.encoder,
        desirable=_count_desirable(corpus, bounds.starts[kept]) if settings.unpaired else None,
    )
    if not kept.any():
        raise _nothing_to_learn(summary, key, length)
    return _Chosen(summary, stream, bounds.starts[kept], bounds.ends[kept], loss_tokens[kept])


def _count_desirable(corpus: Corpus, starts: np.ndarray) -> int:
    return int(np.count_nonzero(corpus.load("flags")[starts] & DESIRABLE))


def _bounds(
    corpus: Corpus, length: int, long: str, stream: bool, progress: Progress, *, encoder: bool
) -> tuple[pack.Bounds, int]:
    """Where the sequences are (the documents, if they are packed later), and how many documents were too long."""
    if encoder and stream:
        return pack.split_stream(int(corpus.lengths.sum()) + 1, length), 0
    if encoder:
        bounds = pack.split_examples(corpus.lengths, length, long)
        return bounds, bounds.long
    if stream and long == "split":
        return pack.split_stream(int(corpus.lengths.sum()), length), 0
    if corpus.format.pairs:
        bounds = pack.shorten_pairs(corpus.lengths, length, long)
        return bounds, bounds.long
    bounds = pack.split_documents(corpus.lengths, length, long)
    if not stream:
        return bounds, bounds.long
    if bounds.long:
        rewrite(corpus, bounds.starts, bounds.ends - bounds.starts, progress)
    return pack.split_stream(int((bounds.ends - bounds.starts).sum()), length), bounds.long


def name_files(files: Sequence[Path]) -> str:
    """These files, for a sentence."""
    return str(files[0]) if len(files) == 1 else f"the {len(files):,} files starting with {files[0]}"


def _nothing_to_learn(summary: Summary, key: str, length: int) -> NothingToLearn:
    if summary.too_long == summary.units:
        instead = "" if summary.pairs else ", or set data.long_documents: split"
        return NothingToLearn(
            f"All {summary.units:,} {summary.unit} in {key} are longer than data.max_length {length}, and "
            f"data.long_documents is drop. Raise data.max_length{instead}."
        )
    if summary.pairs:
        return NothingToLearn(
            f"None of the {summary.units:,} pairs in {key} has loss tokens in both answers: {summary.truncated:,} were "
            f"truncated at data.max_length {length}, which has to hold both prompts and answers. Raise it."
        )
    if summary.truncated:
        return NothingToLearn(
            f"None of the {summary.documents:,} documents in {key} has a loss token: {summary.truncated:,} were "
            f"truncated at data.max_length {length}. Raise it, or set data.long_documents: split."
        )
    return NothingToLearn(
        f"None of the {summary.documents:,} documents in {key} has a loss token. Check that they have answers, or set "
        "data.train_on: all."
    )
