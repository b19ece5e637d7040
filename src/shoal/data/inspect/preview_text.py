"""A preview of data for a person: pieces of text with a style, for a terminal with colour or without."""

from collections.abc import Iterator, Sequence
from typing import Literal

from shoal.data.inspect.packed import PackedDocument, PackedSequence
from shoal.data.inspect.preview import RECORDS_TO_DRAW_FROM, Example, SourcePreview
from shoal.data.inspect.spans import CLOSE, OPEN, MaskedSpan, Span, printable, shorten

Style = Literal["plain", "trained", "heading", "rule"]
Piece = tuple[str, Style]


def source_pieces(preview: SourcePreview, tokenizer: str, characters: int | None, *, drawn: bool) -> Iterator[Piece]:
    """One source: what it is, then each example or sequence. `characters`: the most that are shown of each."""
    template = f", chat template {_template(preview.template)}" if preview.template is not None else ""
    named = preview.path or preview.source
    yield f"{printable(named)}: source {preview.source}, format {preview.format}{template}", "plain"
    yield f"; tokenizer {printable(tokenizer)}, max_length {preview.max_length:,}\n", "plain"
    if preview.objective == "masked_lm":
        yield "seen→predicted, for one draw of the masks: each epoch has others\n", "plain"
    if preview.sequences and preview.records:
        yield f"packed from the first {_count(preview.records, 'record')} only\n", "plain"
    elif drawn:
        yield f"drawn at random from the first {min(preview.records, RECORDS_TO_DRAW_FROM):,} records\n", "plain"
    if preview.skipped:
        yield f"{_count(preview.skipped, 'invalid record')} skipped; the first: {preview.first_skipped}\n", "plain"
    before = None
    for example in preview.examples:
        answer = ""
        if preview.format == "preference":  # a record has both answers, one after the other
            answer = ", rejected" if example.number == before else ", chosen"
        before = example.number
        yield from _example_pieces(example, characters, answer, preview.objective)
    for sequence in preview.sequences:
        yield from _sequence_pieces(sequence, preview, characters)
    if not preview.examples and not preview.sequences:
        yield f"\nThere are only {_count(preview.records, 'record')}.\n", "plain"


def plain_text(pieces: Iterator[Piece]) -> str:
    """The text without colour: loss tokens are between delimiters."""
    return "".join(f"{OPEN}{text}{CLOSE}" if style == "trained" else text for text, style in pieces)


def _example_pieces(example: Example, characters: int | None, answer: str, objective: str) -> Iterator[Piece]:
    size = f"{_count(example.tokens, 'token')}{_counted(example.loss_tokens, objective)}{answer}"
    if example.desirable is not None:
        size += ", desirable" if example.desirable else ", undesirable"
    if example.label is not None:
        size += f", label {printable(example.label)}"
    fate = "" if example.fate == "kept" else f"  {example.fate}: {example.reason}"
    part = "  (the first part of a long document)" if example.continued else ""
    yield f"\nexample {example.number}  {printable(example.where)}  {size}{fate}{part}\n", "heading"
    yield from _span_pieces(example.spans, characters)
    if example.values is not None:
        yield from _span_pieces([Span("bins: " + " ".join(map(str, example.values)), trained=False)], characters)


def _counted(loss_tokens: int, objective: str) -> str:
    """What of an example is in the loss."""
    if objective == "classify":  # its label, which is named
        return ""
    return f", {loss_tokens:,} {'masked' if objective == 'masked_lm' else 'in the loss'}"


def _sequence_pieces(sequence: PackedSequence, preview: SourcePreview, characters: int | None) -> Iterator[Piece]:
    documents = _count(len(sequence.documents), "document")
    yield (
        f"\nsequence {sequence.number}  {sequence.inputs:,} of {preview.max_length:,} slots filled, {documents}, "
        f"{sequence.loss_tokens:,} tokens {'masked' if preview.objective == 'masked_lm' else 'in the loss'}\n",
        "heading",
    )
    for document in sequence.documents:
        yield _rule(document, preview.separate), "rule"
        yield from _span_pieces(document.spans, characters)


def _rule(document: PackedDocument, separate: bool) -> str:
    if document.number == 1:
        positions = "positions from 0"
    elif separate:
        positions = "positions restart at 0"
    else:
        positions = f"positions go on at {document.first_position:,}"
    continues = ", continued" if document.continues else ""
    where = printable(document.where)
    return f"── document {document.number}{continues}  {where}  {_count(document.tokens, 'token')}, {positions} ──\n"


def _span_pieces(spans: Sequence[Span], characters: int | None) -> Iterator[Piece]:
    shown, shortened = (spans, False) if characters is None else shorten(spans, characters)
    for span in shown:
        if span.text:
            text = span.text
            if isinstance(span, MaskedSpan):
                word = text.lstrip(" ") or text  # a space that separates it from the token before is not of it
                if word != text:
                    yield " ", "plain"
                text = f"{span.seen}→{word}"
            yield printable(text), "trained" if span.trained else "plain"
    yield (" …\n" if shortened else "\n"), "plain"


def _template(name: str | None) -> str:
    return "of the tokenizer" if name == "tokenizer" else printable(str(name))


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
