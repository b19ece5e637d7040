"""Statistics of a dataset: lengths, truncation, duplicates, how well it packs."""

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import DataConfig
from shoal.data import pack
from shoal.data.cache import Report
from shoal.data.inspect.cells import CellStats, measure_cells
from shoal.data.inspect.documents import Documents, has_records, long_documents, shown_path
from shoal.data.inspect.lengths import Lengths, describe_lengths
from shoal.data.masks import total_masked
from shoal.data.progress import Progress
from shoal.data.sequences import DOCUMENT, Sequences, StoredSequences
from shoal.data.sources.find import find_source
from shoal.data.sources.record import Record
from shoal.data.tokenizer_base import Tokenizer

_TOKENS_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Duplicates:
    """Documents with the same text and the same loss tokens as an earlier one."""

    documents: int  # copies: the first of its kind is not one
    first: str | None  # where the first copy is
    copy_of: str | None  # and where it stands before


@dataclass(frozen=True)
class Filling:
    """Sequences, and the share of their max_length slots that hold tokens."""

    sequences: int
    filled: float


@dataclass(frozen=True)
class Packing:
    """`chosen`: packed or unpacked, as this config does. `unpacked` pads each document to max_length; it is None where
    the lengths of documents are not known. `packed` is None for examples with a class, which are never packed."""

    chosen: str
    packed: Filling | None
    unpacked: Filling | None


@dataclass(frozen=True)
class ClassShare:
    """A class, and the examples that have it."""

    name: str
    examples: int
    share: float


@dataclass(frozen=True)
class SourceStats:
    """The statistics of one source. Token files have no records, so that `duplicates` is None; nor are the lengths of
    their documents stored, unless they are marked."""

    source: str
    path: str | None
    weight: float
    format: str
    documents: int
    tokens: int
    loss_tokens: int  # of the sequences; masked ones; of examples with a class, one label each
    loss_token_share: float  # of the labels; of a masked language model, of the inputs
    lengths: Lengths | None
    longer: int  # documents longer than max_length
    long_documents: str  # what happens to these: truncate, split, drop
    tokens_lost: int  # because of that
    dropped: int  # documents or sequences without a loss token
    empty: int
    skipped: int
    first_skipped: str | None
    duplicates: Duplicates | None
    packing: Packing
    cells: CellStats | None = None  # of source cells
    objective: str = "causal_lm"
    classes: list[ClassShare] | None = None  # of texts with a class, the most frequent first


def measure_source(
    data: DataConfig,
    tokenizer: Tokenizer,
    sequences: Sequences,
    *,
    weight: float = 1.0,
    report: Report,
    cache: Path | None = None,
    objective: str = "causal_lm",
    mask_ratio: float = 0.0,
) -> SourceStats:
    """The statistics of one source; `sequences` is what `prepare` made of it. `mask_ratio`: of a masked language
    model."""
    summary, length = sequences.summary, data.max_length
    facts = objective_facts(objective)
    loss_tokens, share = summary.loss_tokens, summary.loss_token_share
    if objective == "masked_lm":
        loss_tokens = total_masked(sequences.loss_tokens(np.arange(len(sequences))), mask_ratio)
        share = loss_tokens / (summary.mean_length * summary.sequences)
    elif facts.classes:
        loss_tokens, share = summary.sequences, 1.0
    lengths = document_lengths(sequences)
    cells = None
    if find_source(data.source, data.path) == "cells":
        cells = measure_cells(data, tokenizer, sequences)
    # What has to fit a sequence: a document, or both of a pair.
    units = np.empty(0, np.int64) if lengths is None else lengths
    units = units.reshape(-1, 2).sum(axis=1) if summary.pairs else units
    room = length if summary.encoder else length + 1
    over = units[units > room]
    policy = long_documents(data, summary.joined and summary.classes is None)
    kept_of_each = {"truncate": room, "drop": 0}
    lost = int((over - kept_of_each[policy]).sum()) if policy in kept_of_each else 0
    return SourceStats(
        source=find_source(data.source, data.path),
        path=shown_path(data),
        weight=weight,
        format=summary.format,
        documents=summary.documents,
        tokens=summary.tokens,
        loss_tokens=loss_tokens,
        loss_token_share=round(share, 4),
        lengths=None if lengths is None else describe_lengths(lengths),
        longer=len(over) if cells is None else summary.truncated,
        long_documents=policy,
        tokens_lost=lost if cells is None else cells.tokens_lost,
        dropped=summary.dropped,
        empty=summary.empty,
        skipped=summary.skipped,
        first_skipped=summary.first_skipped,
        duplicates=find_duplicates(data, tokenizer, report=report, cache=cache, objective=objective),
        packing=_packing(data, sequences, lengths),
        cells=cells,
        objective=objective,
        classes=_classes(sequences) if cells is None else None,
    )


def _classes(sequences: Sequences) -> list[ClassShare] | None:
    names = sequences.summary.classes
    if names is None:
        return None
    counts = np.bincount(sequences.labels(np.arange(len(sequences))), minlength=len(names)).tolist()
    found = [
        ClassShare(name, count, round(count / len(sequences), 4)) for name, count in zip(names, counts, strict=True)
    ]
    return sorted(found, key=lambda one: -one.examples)


def document_lengths(sequences: Sequences) -> np.ndarray | None:
    """The tokens of each document; where they were not stored, as they stand in the sequences, if they do."""
    if not isinstance(sequences, StoredSequences):
        return None
    if sequences.documents is not None:
        return sequences.documents
    found = []
    flags = sequences.flags
    for start in range(0, len(flags), _TOKENS_AT_ONCE):
        found.append(np.flatnonzero(flags[start : start + _TOKENS_AT_ONCE] & DOCUMENT) + start)
    firsts = np.concatenate(found)
    if not len(firsts) or firsts[0] != 0:
        firsts = np.concatenate([[0], firsts])
    return np.diff(firsts, append=len(flags))


def _packing(data: DataConfig, sequences: Sequences, lengths: np.ndarray | None) -> Packing:
    joined, length = sequences.summary.joined, data.max_length
    stored = sequences.lengths(np.arange(len(sequences)))
    actual = _filling(stored, length)
    pairs = sequences.summary.pairs
    labelled = sequences.summary.desirable is not None
    is_packed = bool(data.pack) if joined or pairs or labelled else sequences.separate
    if sequences.summary.encoder:
        return _packing_of_encoder(data, sequences, lengths, actual)
    if is_packed:
        if lengths is None:
            return Packing("packed", actual, None)
        place = pack.shorten_pairs if pairs else pack.split_documents
        single = place(lengths, length, long_documents(data, joined))
        kept = (single.ends - single.starts).reshape(-1, 2 if pairs else 1).sum(axis=1)
        return Packing("packed", actual, _filling(kept, length))
    if joined and lengths is not None:
        stream = pack.split_stream(int(lengths.sum()), length)
        return Packing("unpacked", _filling(stream.ends - stream.starts, length), actual)
    counts = pack.fit_documents(stored, length + 1).counts
    packed = Filling(len(counts), round(float(stored.sum() - len(counts)) / (len(counts) * length), 4))
    return Packing("unpacked", packed, actual)


def _packing_of_encoder(data: DataConfig, sequences: Sequences, lengths: np.ndarray | None, actual: Filling) -> Packing:
    """Texts are joined only if data.pack says so, and examples with a class, or cells, never."""
    length, summary = data.max_length, sequences.summary
    if lengths is None:
        return Packing("packed", actual, None)
    if summary.classes is not None or not summary.joined:
        return Packing("unpacked", None, actual)
    if data.pack is True:
        single = pack.split_examples(lengths, length, "split")
        return Packing("packed", actual, _filling(single.ends - single.starts, length))
    stream = pack.split_stream(int(lengths.sum()) + 1, length)
    return Packing("unpacked", _filling(stream.ends - stream.starts, length), actual)


def _filling(tokens: np.ndarray, length: int) -> Filling:
    """Of sequences with these many tokens, each of which has one input less."""
    return Filling(len(tokens), round(float((tokens - 1).sum()) / (max(len(tokens), 1) * length), 4))


def find_duplicates(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    report: Report,
    cache: Path | None = None,
    objective: str = "causal_lm",
) -> Duplicates | None:
    """Compare the text of all documents, by a hash of 8 bytes: about 24 bytes of memory per document."""
    if not has_records(data):
        return None
    progress = Progress(report)
    hashes, lines, files = array("Q"), array("q"), array("l")
    names: dict[Path, int] = {}
    # Bad records were counted when the data was prepared.
    skipping = data.model_copy(update={"on_error": "skip"})
    documents = Documents(skipping, tokenizer, report=lambda _: None, cache=cache, objective=objective)
    for digest, record in _hashes(documents):
        hashes.append(digest)
        lines.append(-1 if record.line is None else record.line)
        files.append(names.setdefault(record.file, len(names)))
        progress.tick("Looking for duplicates", len(hashes), "documents")
    values = np.frombuffer(hashes, dtype=np.uint64)
    order = np.argsort(values, kind="stable")  # equal ones keep their order, so the first of each kind is the original
    copies = order[1:][values[order[1:]] == values[order[:-1]]]
    if not len(copies):
        return Duplicates(0, None, None)
    copy = int(copies.min())
    original = int(np.flatnonzero(values == values[copy])[0])

    def where(index: int) -> str:
        return Record({}, list(names)[files[index]], None if lines[index] < 0 else lines[index]).where

    return Duplicates(len(copies), where(copy), where(original))


def _hashes(documents: Documents) -> Iterator[tuple[int, Record]]:
    """A hash of each document, and the record that ends it. Documents without text are not compared."""
    digest, empty = hashlib.blake2b(digest_size=8), True
    for _, record, document in documents:
        for text, trained in document.segments:
            written = text.encode()
            digest.update(b"%d %d " % (trained, len(written)) + written)
            empty = empty and not written
        if not record.continued:
            if not empty:
                yield int.from_bytes(digest.digest(), "little"), record
            digest, empty = hashlib.blake2b(digest_size=8), True
