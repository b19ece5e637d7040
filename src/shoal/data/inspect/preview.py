"""What the model sees of a dataset: its first examples, or packed sequences of them, decoded.

Only the first records are read, so that this is quick for data of any size.
"""

import random
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from shoal.catalogue.objectives import objective_facts
from shoal.config.schema import DataConfig
from shoal.data.cache import Report
from shoal.data.encode import encode
from shoal.data.inspect.cells import read_some
from shoal.data.inspect.documents import Documents, Numbered, has_records, shown_path
from shoal.data.inspect.fates import fates_of
from shoal.data.inspect.packed import Choice, PackedSequence, packed_sequence, sequences_of
from shoal.data.inspect.spans import Span, decode_masked, decode_spans
from shoal.data.masks import Masks, eligible_tokens
from shoal.data.order import permute
from shoal.data.prepare import prepare
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN
from shoal.data.sources.find import find_source
from shoal.data.tokenizer_base import Tokenizer

RECORDS_TO_DRAW_FROM = 10_000


@dataclass(frozen=True)
class Example:
    """One document. `fate` is kept, truncated, split or dropped; `reason` says why it is not kept as it is."""

    number: int  # of the record, from 0
    where: str  # its file and line
    tokens: int
    loss_tokens: int  # of those that are kept
    fate: str
    reason: str | None
    continued: bool  # there is more of this document in its file, which is read in parts
    spans: list[Span]
    desirable: bool | None = None  # the label of its answer, if it has one
    label: str | None = None  # its class, if examples have one
    values: list[int] | None = None  # the bin of each token of a cell


@dataclass(frozen=True)
class SourcePreview:
    """The examples of one source, or its sequences."""

    source: str
    path: str | None
    format: str
    template: str | None  # of format chat: data.chat_template, or "tokenizer" for its own
    separate: bool  # packed documents do not attend to each other, and their positions restart
    max_length: int
    records: int  # how many were read
    skipped: int
    first_skipped: str | None
    examples: list[Example]
    sequences: list[PackedSequence]
    objective: str = "causal_lm"


def preview_source(
    data: DataConfig,
    tokenizer: Tokenizer,
    choice: Choice,
    *,
    report: Report,
    cache: Path | None = None,
    not_apart: str | None = None,
    objective: str = "causal_lm",
    masks: Masks | None = None,
) -> SourcePreview:
    """Decode the chosen examples or sequences of one source. `not_apart` and `objective` are as in `prepare`. `masks`:
    those of a masked language model, of which one draw is shown."""
    if find_source(data.source, data.path) == "cells":
        return _preview_cells(data, tokenizer, choice, objective, masks)
    if not has_records(data):
        return _preview_prepared(
            data,
            tokenizer,
            choice,
            report=report,
            cache=cache,
            not_apart=not_apart,
            objective=objective,
            masks=masks,
        )
    reader = Documents(data, tokenizer, report=report, cache=cache, objective=objective)
    separate = (data.pack is True or (data.pack == "auto" and not_apart is None)) and not reader.format.joined
    separate = separate or reader.format.pairs or reader.format.unpaired
    separate = (separate or (data.document_mask and reader.format.joined)) and not reader.encoder
    examples: list[Example] = []
    sequences: list[PackedSequence] = []
    if choice.sequences:
        sequences = sequences_of(reader, tokenizer, choice, separate, masks)
    else:
        chosen = _chosen(reader, choice)
        examples = [example for record in chosen for example in _examples(tokenizer, reader, record, masks)]
    chat = reader.format.name == "chat"
    return SourcePreview(
        source=find_source(data.source, data.path),
        path=shown_path(data),
        format=reader.format.name,
        template=(data.chat_template or "tokenizer") if chat else None,
        separate=separate,
        max_length=data.max_length,
        records=reader.read,
        skipped=reader.skipped,
        first_skipped=reader.first_skipped,
        examples=examples,
        sequences=sequences,
        objective=objective,
    )


def _preview_cells(
    data: DataConfig, tokenizer: Tokenizer, choice: Choice, objective: str, masks: Masks | None
) -> SourcePreview:
    """Some of the first cells, or drawn from all of them: they can be read from anywhere."""
    shown, count = read_some(data, tokenizer, objective, first=choice.first, count=choice.count, seed=choice.seed)
    spans = [spans_of(tokenizer, one.ids, one.trained, objective, masks, one.number) for one in shown]
    examples = [
        Example(
            number=one.number,
            where=one.where,
            tokens=len(one.ids),
            loss_tokens=trained,
            fate="truncated" if one.left_out else "kept",
            reason=f"{one.left_out:,} genes with lower expression do not fit" if one.left_out else None,
            continued=False,
            spans=found,
            label=one.label,
            values=one.values,
        )
        for one, (found, trained) in zip(shown, spans, strict=True)
    ]
    return SourcePreview(
        source="cells",
        path=shown_path(data),
        format=str(data.cells.tokens),
        template=None,
        separate=False,
        max_length=data.max_length,
        records=count,
        skipped=0,
        first_skipped=None,
        examples=examples,
        sequences=[],
        objective=objective,
    )


def _preview_prepared(
    data: DataConfig,
    tokenizer: Tokenizer,
    choice: Choice,
    *,
    report: Report,
    cache: Path | None,
    not_apart: str | None,
    objective: str,
    masks: Masks | None,
) -> SourcePreview:
    """The sequences of token files, which have no records."""
    prepared = prepare(data, tokenizer, cache=cache, report=report, not_apart=not_apart, objective=objective)
    count = len(prepared)
    if choice.seed is None:
        numbers = np.arange(min(choice.first, count), min(choice.first + choice.count, count))
    else:
        numbers = permute(np.arange(min(choice.count, count)), count, choice.seed)
    found = []
    for number in numbers.tolist():
        tokens, flags = prepared[number]
        begins = np.union1d([0], np.flatnonzero(flags & DOCUMENT)).astype(int).tolist()
        where = [shown_path(data) or str(data.source)] * len(begins)
        found.append(packed_sequence(tokenizer, number, tokens, flags, begins, where, prepared.separate, masks))
    return SourcePreview(
        source=find_source(data.source, data.path),
        path=shown_path(data),
        format=prepared.summary.format,
        template=None,
        separate=prepared.separate,
        max_length=data.max_length,
        records=0,
        skipped=0,
        first_skipped=None,
        examples=[],
        sequences=found,
        objective=objective,
    )


def _chosen(reader: Documents, choice: Choice) -> list[tuple[Numbered, ...]]:
    """The documents of the chosen records: one of each, or a pair. Of a document that is read in parts, the first part
    only."""
    one_by_one = (one for one in reader if not one[2].continues)
    beginnings = zip(*[one_by_one] * (2 if reader.format.pairs else 1), strict=True)
    if choice.seed is None:
        return list(islice(beginnings, choice.first, choice.first + choice.count))
    # Reservoir sampling: no more than the sample is kept.
    draw = random.Random(choice.seed)
    drawn: list[tuple[Numbered, ...]] = []
    for seen, one in enumerate(islice(beginnings, choice.first, choice.first + RECORDS_TO_DRAW_FROM)):
        if seen < choice.count:
            drawn.append(one)
        elif (slot := draw.randrange(seen + 1)) < choice.count:
            drawn[slot] = one
    return sorted(drawn, key=lambda one: one[0][0])


def _examples(
    tokenizer: Tokenizer, reader: Documents, documents: tuple[Numbered, ...], masks: Masks | None
) -> list[Example]:
    """The examples of one record."""
    encoded = [
        encode(tokenizer, [document], keep_empty=reader.format.pairs, encoder=reader.encoder)
        for _, _, document in documents
    ]
    trained = [(one.flags & LOSS_TOKEN) != 0 for one in encoded]
    fates = fates_of(reader.data, reader.format.joined, trained, encoder=reader.encoder, labelled=reader.labelled)
    examples = []
    for (number, record, document), one, counted, fate in zip(documents, encoded, trained, fates, strict=True):
        ids, marks = one.ids[: fate.kept], counted[: fate.kept]
        if reader.encoder:
            parts = range(0, len(ids), reader.data.max_length)  # of a text that is split, each has masks of its own
            shown = [
                spans_of(
                    tokenizer,
                    ids[at : at + parts.step],
                    marks[at : at + parts.step],
                    reader.objective,
                    masks,
                    number + at,
                )
                for at in parts
            ]
            spans, loss_tokens = [span for some, _ in shown for span in some], sum(count for _, count in shown)
        else:
            spans, loss_tokens = decode_spans(tokenizer, ids, marks), int(marks[1:].sum())
        examples.append(
            Example(
                number=number,
                where=record.where,
                tokens=len(one.ids),
                loss_tokens=loss_tokens,
                fate=fate.name,
                reason=fate.reason,
                continued=record.continued,
                spans=spans,
                desirable=document.desirable,
                label=document.label,
            )
        )
    return examples


def spans_of(
    tokenizer: Tokenizer, ids: np.ndarray, trained: np.ndarray, objective: str, masks: Masks | None, position: int
) -> tuple[list[Span], int]:
    """An example of an encoder as spans, and how many of its tokens are in the loss: the masked ones, or none where
    the label is learnt."""
    facts = objective_facts(objective)
    if masks is not None:
        flags = np.append(trained.astype(np.uint8) * LOSS_TOKEN, np.uint8(0))
        seen, chosen = masks.draw(ids, eligible_tokens(flags), position)
        return decode_masked(tokenizer, ids, seen, chosen), len(chosen)
    marks = np.zeros(len(ids), dtype=bool) if facts.encoder else trained
    return decode_spans(tokenizer, ids, marks), int(marks.sum())
