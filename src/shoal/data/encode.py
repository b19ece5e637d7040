"""Documents to token ids and flags. A pure function of a batch, so that any process may compute it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.data.formats.choose import Document
from shoal.data.sequences import DESIRABLE, DOCUMENT, LOSS_TOKEN
from shoal.data.tokenizer_base import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """A batch of documents or parts of documents, one after another. Empty documents are left out and counted."""

    ids: np.ndarray  # int32
    flags: np.ndarray  # uint8
    lengths: np.ndarray  # int64, tokens of each part
    continued: np.ndarray  # bool, per part: its document continues in the next
    empty: int
    labels: tuple[str, ...] = ()  # the classes of the documents, if they have one


def encode(
    tokenizer: Tokenizer, documents: Sequence[Document], *, keep_empty: bool = False, encoder: bool = False
) -> Encoded:
    """Each document: the begin token where the tokenizer prepends one, the text, the end token. With `keep_empty`,
    empty ones are not left out: pairs are counted by their number. For an `encoder` there is always a begin token, if
    the tokenizer has one, and the tokens of the text are those that count."""
    begins = tokenizer.begin is not None and (encoder or tokenizer.prepends_begin)
    begin = np.array([tokenizer.begin], np.int32) if begins else None
    end = np.array([tokenizer.end], np.int32)
    joined, counts = tokenizer.encode_joined([text for one in documents if not one.whole for text, _ in one.segments])
    segments, at = iter(counts), 0
    conversations = [_text(one) for one in documents if one.whole]
    wholes = iter(tokenizer.encode_with_offsets(conversations) if conversations else ())
    parts: list[np.ndarray] = [np.empty(0, np.int32)]
    runs: list[int] = []  # tokens that are all trained or all not
    trained: list[bool] = []
    firsts: list[int] = []  # where documents begin
    desirable: list[int] = []  # the same of those with the label true
    lengths: list[int] = []
    continued: list[bool] = []
    labels: list[str] = []
    empty = written = 0
    for document in documents:
        if document.whole:
            ids, *offsets = next(wholes)
            found = _runs(document, *offsets)
        else:
            found = [(next(segments), loss) for _, loss in document.segments]
            ids = joined[at : at + sum(count for count, _ in found)]
            at += len(ids)
        if not (len(ids) or keep_empty or document.continues or document.continued):
            empty += 1
            continue
        if encoder:
            found = [(count, True) for count, _ in found]
        if document.label is not None:
            labels.append(document.label)
        if begin is not None and (document.begin or encoder) and not document.continues:
            parts.append(begin)
            found.insert(0, (1, False))
        parts.append(ids)
        if (document.end or encoder) and not document.continued:
            # The end token is a loss token if the last segment is. After a conversation it closes an answer.
            trained_end = any(loss for _, loss in document.segments) if document.whole else document.segments[-1][1]
            parts.append(end)
            found.append((1, trained_end and not encoder))
        added = 0
        for count, loss in found:
            runs.append(count)
            trained.append(loss)
            added += count
        if added and not document.continues:
            firsts.append(written)
            desirable += [written] if document.desirable else []
        lengths.append(added)
        continued.append(document.continued)
        written += added
    ids = np.concatenate(parts)
    assert not ids.size or (ids.min() >= 0 and ids.max() < tokenizer.size)
    flags = np.repeat(np.array(trained, dtype=np.uint8) * np.uint8(LOSS_TOKEN), runs)
    flags[firsts] = DOCUMENT  # and not a loss token: no input of the document precedes it
    flags[desirable] |= DESIRABLE
    return Encoded(ids, flags, np.array(lengths, dtype=np.int64), np.array(continued, dtype=bool), empty, tuple(labels))


def _text(document: Document) -> str:
    return "".join(text for text, _ in document.segments)


def _runs(document: Document, starts: np.ndarray, ends: np.ndarray) -> list[tuple[int, bool]]:
    """The tokens of a document that is one text, in runs: how many, and whether they are trained. A token that has any
    character of a trained segment is trained, as in transformers."""
    runs: list[tuple[int, bool]] = []
    done = at = 0
    for text, trained in document.segments:
        if trained:
            first = max(int(np.searchsorted(ends, at, side="right")), done)
            last = max(int(np.searchsorted(starts, at + len(text), side="left")), first)
            runs += [(first - done, False), (last - first, True)]
            done = last
        at += len(text)
    return [*runs, (len(starts) - done, False)]
