"""A sequence as text, in spans of tokens that the loss counts and of tokens that it does not."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from shoal.data.tokenizer_base import Tokenizer

# Delimiters of loss tokens where there is no colour.
OPEN, CLOSE = "⟦", "⟧"
# Control characters of a text could change the terminal it is printed to: shown as pictures. Line ends and tabs stay.
_PICTURES = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    0x7F: 0x2421,
    **dict.fromkeys(range(0x80, 0xA0), 0xFFFD),
}


@dataclass(frozen=True)
class Span:
    """Consecutive tokens, decoded. `trained`: they are loss tokens."""

    text: str
    trained: bool


@dataclass(frozen=True)
class MaskedSpan(Span):
    """A token that is predicted from the others. `seen`: what stands in its place: the mask token, another, itself."""

    seen: str


def decode_spans(
    tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, trained: Sequence[bool] | np.ndarray
) -> list[Span]:
    """Decode `tokens`, special tokens included; `trained` has a value for each."""
    marks = np.asarray(trained, dtype=bool)
    assert len(marks) == len(tokens)
    if not len(marks):
        return []
    edges = [0, *(np.flatnonzero(marks[1:] != marks[:-1]) + 1).tolist(), len(marks)]
    texts = _decode_between(tokenizer, tokens, edges)
    return [Span(text, bool(marks[start])) for text, start in zip(texts, edges[:-1], strict=True)]


def decode_masked(tokenizer: Tokenizer, tokens: np.ndarray, seen: np.ndarray, chosen: np.ndarray) -> list[Span]:
    """Decode `tokens`, of which those at `chosen` are predicted, one span each; the model sees `seen`."""
    if not len(tokens):
        return []
    edges = np.unique(np.concatenate([[0, len(tokens)], chosen, chosen + 1]).astype(np.int64)).tolist()
    predicted = set(chosen.tolist())
    return [
        MaskedSpan(text, True, tokenizer.decode(seen[[start]])) if start in predicted else Span(text, False)
        for text, start in zip(_decode_between(tokenizer, tokens, edges), edges[:-1], strict=True)
    ]


def _decode_between(tokenizer: Tokenizer, tokens: Sequence[int] | np.ndarray, edges: list[int]) -> list[str]:
    """The text of the tokens between two neighbouring edges, for all of them."""
    texts = []
    previous = 0
    for start, end in pairwise(edges):
        # Together with the span before it: some tokenizers drop the space before the first word they decode.
        before = tokenizer.decode(tokens[previous:start])
        both = tokenizer.decode(tokens[previous:end])
        text = both[len(before) :] if both.startswith(before) else tokenizer.decode(tokens[start:end])
        texts.append(text)
        previous = start
    return texts


def shorten(spans: Sequence[Span], characters: int) -> tuple[list[Span], bool]:
    """The spans of the first `characters`, and whether there are more."""
    kept: list[Span] = []
    for span in spans:
        if len(span.text) > characters:
            return [*kept, Span(span.text[:characters], span.trained)] if characters else kept, True
        kept.append(span)
        characters -= len(span.text)
    return kept, False


def mark(spans: Iterable[Span]) -> str:
    """The text, with loss tokens between delimiters."""
    return "".join(f"{OPEN}{span.text}{CLOSE}" if span.trained else span.text for span in spans)


def printable(text: str) -> str:
    """`text` without control characters that a terminal would obey."""
    return text.translate(_PICTURES)
