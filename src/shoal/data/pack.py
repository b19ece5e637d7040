"""Where sequences begin and end among the tokens. Arithmetic on lengths only: no token is read here.

A sequence of at most length + 1 tokens gives at most `length` inputs (all but its last) and labels (all but its first).
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Bounds:
    """Sequence k is tokens[starts[k] : ends[k]]. `truncated` counts documents cut at the maximum length."""

    starts: np.ndarray
    ends: np.ndarray
    truncated: int = 0


def split_stream(tokens: int, length: int) -> Bounds:
    """Split the concatenation of all documents into full sequences that share one token with their neighbour.

    The shared token is the last label of one sequence and the first input of the next, so each token but the very
    first is a label exactly once. Attention crosses document boundaries within a sequence, as is usual in pretraining:
    the model learns to take the end token between documents for a boundary.
    """
    starts = np.arange(0, max(tokens - 1, 0), length, dtype=np.int64)
    return Bounds(starts, np.minimum(starts + length + 1, tokens))


def split_documents(lengths: np.ndarray, length: int, *, split: bool) -> Bounds:
    """One document per sequence. Longer ones become several (`split`, overlapping as in a stream) or are truncated."""
    lengths = lengths.astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    if not split:
        return Bounds(firsts, firsts + np.minimum(lengths, length + 1), int(np.sum(lengths > length + 1)))
    parts = np.maximum(-(-(lengths - 1) // length), 1)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.repeat(firsts, parts) + number * length
    return Bounds(starts, np.minimum(starts + length + 1, np.repeat(firsts + lengths, parts)))


@dataclass(frozen=True)
class Packing:
    """`order`: document indices, sequence by sequence. `counts`: documents per sequence."""

    order: np.ndarray
    counts: np.ndarray


def fit_documents(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack whole documents into sequences of at most `capacity` tokens, by best-fit decreasing bin packing.

    The longest document comes first, each into the fullest sequence it fits. The result is within 22% of the fewest
    sequences possible and usually within one. Sequences with the same free space are kept on a stack; a bit mask says
    which stacks are not empty, so that the tightest fit is the lowest set bit from the document's length upwards.
    Documents of equal length keep their order: the result is a function of `lengths` alone.
    """
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    by_size = np.argsort(-lengths.astype(np.int64), kind="stable")
    packed: list[list[int]] = []
    with_room: list[list[int]] = [[] for _ in range(capacity)]
    occupied = 0
    for document, size in zip(by_size.tolist(), lengths[by_size].tolist(), strict=True):
        fitting = occupied >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            index = with_room[room].pop()
            if not with_room[room]:
                occupied ^= 1 << room
            packed[index].append(document)
        else:
            room, index = capacity, len(packed)
            packed.append([document])
        left = room - size
        if left:
            with_room[left].append(index)
            occupied |= 1 << left
    order = np.fromiter(
        (document for documents in packed for document in documents), dtype=np.int64, count=lengths.size
    )
    return Packing(order, np.array([len(documents) for documents in packed], dtype=np.int64))
