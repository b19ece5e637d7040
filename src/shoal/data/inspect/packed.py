"""Packed sequences of the first records, as they are trained on."""

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from shoal.data import pack
from shoal.data.encode import encode
from shoal.data.formats.choose import Document
from shoal.data.inspect.documents import Documents, long_documents
from shoal.data.inspect.spans import Span, decode_masked, decode_spans
from shoal.data.masks import Masks, eligible_tokens
from shoal.data.order import permute
from shoal.data.rewrite import count_loss_tokens
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake

RECORDS_TO_PACK = 2_000
CHARACTERS_TO_PACK = 1 << 22


@dataclass(frozen=True)
class PackedDocument:
    """A document, or a part of one, in a sequence."""

    number: int  # within the sequence, from 1
    where: str
    tokens: int
    first_position: int
    continues: bool  # the sequence before it has its beginning
    spans: list[Span]


@dataclass(frozen=True)
class PackedSequence:
    """A sequence as it is trained on."""

    number: int  # of the packed records, from 0
    inputs: int
    loss_tokens: int
    documents: list[PackedDocument]


@dataclass(frozen=True)
class Choice:
    """Which examples or sequences are shown: `count` from `first` on, or drawn at random with `seed`."""

    count: int = 3
    first: int = 0
    seed: int | None = None
    sequences: bool = False


@dataclass(frozen=True)
class _Tokens:
    """The first documents of a source, one after another."""

    ids: np.ndarray
    flags: np.ndarray
    lengths: np.ndarray  # of each document
    where: list[str]


def _first_tokens(reader: Documents, tokenizer: Tokenizer) -> _Tokens:
    documents: list[Document] = []
    places: list[str] = []
    characters = 0
    for _, record, document in islice(reader, RECORDS_TO_PACK):
        characters += sum(len(text) for text, _ in document.segments)
        ends = characters >= CHARACTERS_TO_PACK
        documents.append(replace(document, continued=False) if ends else document)
        places.append(record.where)
        if ends:
            break
    found: list[tuple[str, np.ndarray, np.ndarray]] = []
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for document, place in zip(documents, places, strict=True):
        encoded = encode(tokenizer, [document], keep_empty=reader.format.pairs, encoder=reader.encoder)
        parts.append((encoded.ids, encoded.flags))
        if not document.continued:
            ids, flags = (np.concatenate(values) for values in zip(*parts, strict=True))
            found += [(place, ids, flags)] if len(ids) or reader.format.pairs else []
            parts = []
    data, most = reader.data, reader.data.max_length + 1
    if data.pack and reader.format.joined and (policy := long_documents(data, joined=True)) != "split":
        # Before they are joined to a stream, whose sequences are split without regard to documents.
        found = [
            (place, ids[:most], flags[:most]) for place, ids, flags in found if policy != "drop" or len(ids) <= most
        ]
    if not found:
        raise UserMistake(f"There is no text in the first {len(documents):,} records. Check data.path.")
    where, tokens, marks = (list(values) for values in zip(*found, strict=True))
    if reader.encoder:  # see `pack.split_examples`
        tokens.append(np.array([tokenizer.end], dtype=np.int32))
        marks.append(np.zeros(1, dtype=np.uint8))
    lengths = np.array([len(one) for one in tokens[: len(where)]], dtype=np.int64)
    return _Tokens(np.concatenate(tokens), np.concatenate(marks), lengths, where)


def sequences_of(
    reader: Documents, tokenizer: Tokenizer, choice: Choice, separate: bool, masks: Masks | None
) -> list[PackedSequence]:
    """Pack the first records as `prepare` packs all, and show some sequences in a random order, as training does."""
    data, joined, pairs = reader.data, reader.format.joined, reader.format.pairs
    found = _first_tokens(reader, tokenizer)
    length = data.max_length
    packed = data.pack is True if reader.encoder else bool(data.pack)
    if packed and joined and not reader.labelled:
        bounds = pack.split_stream(len(found.ids), length)
    elif reader.encoder:
        bounds = pack.split_examples(found.lengths, length, long_documents(data, joined and not reader.labelled))
    else:
        place = pack.shorten_pairs if pairs else pack.split_documents
        bounds = place(found.lengths, length, long_documents(data, joined))
    counted = replace(bounds, ends=bounds.ends - 1) if reader.encoder else bounds  # inputs, or labels
    kept = count_loss_tokens(found.flags, counted) > (-1 if reader.labelled else 0)
    if pairs:
        kept = kept.reshape(-1, 2).all(axis=1).repeat(2)
    starts, ends = bounds.starts[kept], bounds.ends[kept]
    if not len(starts):
        raise UserMistake(
            f"None of the first {reader.read:,} records has a loss token within data.max_length {length}."
        )
    pieces = [[(int(start), int(end))] for start, end in zip(starts, ends, strict=True)]
    if separate and not joined:
        packing = pack.pack_units(ends - starts, length + 1, 2 if pairs else 1, together=bool(data.pack))
        groups = np.split(packing.order, np.cumsum(packing.counts)[:-1])
        pieces = [[(int(starts[one]), int(ends[one])) for one in group] for group in groups]
    shown = permute(np.arange(len(pieces)), len(pieces), choice.seed or 0)[choice.first : choice.first + choice.count]
    firsts = np.cumsum(found.lengths) - found.lengths
    sequences = []
    for number in shown.tolist():
        at = np.concatenate([np.arange(start, end) for start, end in pieces[number]])
        ids, flags = found.ids[at], found.flags[at]
        parts = np.cumsum([0, *(end - start for start, end in pieces[number])])[:-1]
        begins = np.union1d(parts, np.flatnonzero(flags & DOCUMENT))
        where = [found.where[one] for one in (np.searchsorted(firsts, at[begins], side="right") - 1).tolist()]
        sequences.append(
            packed_sequence(
                tokenizer, number, ids, flags, begins.tolist(), where, separate, masks, encoder=reader.encoder
            )
        )
    return sequences


def packed_sequence(
    tokenizer: Tokenizer,
    number: int,
    ids: np.ndarray,
    flags: np.ndarray,
    begins: list[int],
    where: list[str],
    separate: bool,
    masks: Masks | None = None,
    *,
    encoder: bool = False,
) -> PackedSequence:
    """The sequence with these tokens, whose documents begin at `begins` and are from `where`."""
    encoder = encoder or masks is not None
    trained = (flags & LOSS_TOKEN) != 0
    trained[:1] = False  # no input precedes it
    chosen = np.empty(0, dtype=np.int64)
    seen = ids
    if encoder:  # the last one is no input
        ids = ids[:-1]
        pairs = [(begin, place) for begin, place in zip(begins, where, strict=True) if begin < len(ids)]
        begins, where = [begin for begin, _ in pairs], [place for _, place in pairs]
    if masks is not None:
        seen, chosen = masks.draw(ids, eligible_tokens(flags), number)
    documents = []
    for index, (place, first, last) in enumerate(zip(where, begins, [*begins[1:], len(ids)], strict=True), start=1):
        if encoder:
            inside = chosen[(chosen >= first) & (chosen < last)] - first
            spans = decode_masked(tokenizer, ids[first:last], seen[first:last], inside)
        else:
            spans = decode_spans(tokenizer, ids[first:last], trained[first:last])
        documents.append(
            PackedDocument(
                number=index,
                where=place,
                tokens=last - first,
                first_position=0 if separate else first,
                continues=not flags[first] & DOCUMENT,
                spans=spans,
            )
        )
    if encoder:
        return PackedSequence(number, len(ids), len(chosen), documents)
    return PackedSequence(number, len(ids) - 1, int(trained.sum()), documents)
