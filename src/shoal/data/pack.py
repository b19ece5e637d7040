"""Where rows begin and end among the tokens. Arithmetic on lengths only: no token is looked at here.

A row of at most length + 1 tokens gives at most `length` inputs (all but its last) and labels (all but its first).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Cuts:
    """Row k is tokens[starts[k] : ends[k]]. `truncated` documents lost their tail."""

    starts: np.ndarray
    ends: np.ndarray
    truncated: int = 0


def cut_stream(tokens: int, length: int) -> Cuts:
    """Cut one long stream of documents into full rows that share one token with their neighbour.

    The shared token is the last label of one row and the first input of the next, so each token but the very first is
    a label exactly once. Attention runs across the borders of documents in a row, as is usual in pretraining: the end
    token between them is what the model learns to take for a border.
    """
    starts = np.arange(0, max(tokens - 1, 0), length, dtype=np.int64)
    return Cuts(starts, np.minimum(starts + length + 1, tokens))


def cut_documents(lengths: np.ndarray, length: int, *, split: bool) -> Cuts:
    """One document a row. A longer one becomes several rows (`split`, overlapping as in a stream) or loses its tail."""
    lengths = lengths.astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    if not split:
        return Cuts(firsts, firsts + np.minimum(lengths, length + 1), int(np.sum(lengths > length + 1)))
    pieces = np.maximum(-(-(lengths - 1) // length), 1)
    number = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = np.repeat(firsts, pieces) + number * length
    return Cuts(starts, np.minimum(starts + length + 1, np.repeat(firsts + lengths, pieces)))


@dataclass(frozen=True)
class Packing:
    """`order`: document numbers, row after row. `counts`: how many of them each row takes."""

    order: np.ndarray
    counts: np.ndarray


def fit_documents(lengths: np.ndarray, capacity: int) -> Packing:
    """Whole documents into rows of at most `capacity` tokens: the longest first, each into the fullest row it fits.

    Best-fit decreasing is within 22 per cent of the fewest rows possible and usually within one. The rows open for
    each amount of room are kept in stacks; one bit per amount says which stacks hold any, so that the tightest fit is
    the lowest bit from the document's length upwards. Equal documents keep their order: the result is a function of
    `lengths` alone.
    """
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    by_size = np.argsort(-lengths.astype(np.int64), kind="stable")
    rows: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity)]
    occupied = 0
    for document, size in zip(by_size.tolist(), lengths[by_size].tolist(), strict=True):
        fitting = occupied >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                occupied ^= 1 << room
            rows[row].append(document)
        else:
            room, row = capacity, len(rows)
            rows.append([document])
        left = room - size
        if left:
            with_room[left].append(row)
            occupied |= 1 << left
    order = np.fromiter((document for row in rows for document in row), dtype=np.int64, count=lengths.size)
    return Packing(order, np.array([len(row) for row in rows], dtype=np.int64))
