"""Where sequences begin and end among the tokens. Arithmetic on lengths only: no token is read here.

A sequence of at most length + 1 tokens gives at most `length` inputs (all but its last) and labels (all but its first).
"""

from dataclasses import dataclass

import numpy as np

_DOCUMENTS_AT_ONCE = 1 << 16  # Python objects of all at once would take ten times the memory of the arrays


@dataclass(frozen=True)
class Bounds:
    """Sequence k is tokens[starts[k] : ends[k]]. `long` counts documents longer than the maximum length."""

    starts: np.ndarray
    ends: np.ndarray
    long: int = 0


def split_stream(tokens: int, length: int) -> Bounds:
    """Split the concatenation of all documents into full sequences that share one token with their neighbour.

    The shared token is the last label of one sequence and the first input of the next, so each token but the very
    first is a label exactly once. Attention crosses document boundaries within a sequence, as is usual in pretraining:
    the model learns to take the end token between documents for a boundary.
    """
    starts = np.arange(0, max(tokens - 1, 0), length, dtype=np.int64)
    return Bounds(starts, np.minimum(starts + length + 1, tokens))


def rule_for_long(chosen: str, joined: bool) -> str:
    """What happens to documents longer than data.max_length: truncate, split or drop; `auto` by their kind."""
    if chosen != "auto":
        return chosen
    return "split" if joined else "truncate"


def split_documents(lengths: np.ndarray, length: int, long: str) -> Bounds:
    """One document per sequence. `long`: longer ones become several sequences that overlap as in a stream (`split`),
    end at the maximum length (`truncate`), or are left out (`drop`)."""
    lengths = lengths.astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    too_long = lengths > length + 1
    count = int(np.sum(too_long))
    if long == "truncate":
        return Bounds(firsts, firsts + np.minimum(lengths, length + 1), count)
    if long == "drop":
        return Bounds(firsts[~too_long], (firsts + lengths)[~too_long], count)
    assert long == "split"
    parts = np.maximum(-(-(lengths - 1) // length), 1)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.repeat(firsts, parts) + number * length
    return Bounds(starts, np.minimum(starts + length + 1, np.repeat(firsts + lengths, parts)), count)


def split_examples(lengths: np.ndarray, length: int, long: str) -> Bounds:
    """As `split_documents`, for encoders: every token of a document is an input, so that its sequence ends one token
    later. That token, which is the next document's first, is never read."""
    lengths = lengths.astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    too_long = lengths > length
    count = int(np.sum(too_long))
    if long == "truncate":
        return Bounds(firsts, firsts + np.minimum(lengths, length) + 1, count)
    if long == "drop":
        return Bounds(firsts[~too_long], (firsts + lengths)[~too_long] + 1, count)
    assert long == "split"
    parts = -(-lengths // length)
    number = np.arange(int(parts.sum())) - np.repeat(np.cumsum(parts) - parts, parts)
    starts = np.repeat(firsts, parts) + number * length
    return Bounds(starts, np.minimum(starts + length, np.repeat(firsts + lengths, parts)) + 1, count)


def shorten_pairs(lengths: np.ndarray, length: int, long: str) -> Bounds:
    """The documents of pairs, which are consecutive and have to fit one sequence together. `long`: the answers of
    longer pairs are shortened (`truncate`), the longer one first, or both are left out (`drop`)."""
    lengths = lengths.astype(np.int64)
    firsts = np.cumsum(lengths) - lengths
    both = lengths.reshape(-1, 2)
    too_long = both.sum(axis=1) > length + 1
    count = int(np.sum(too_long))
    if long == "drop":
        kept = np.repeat(~too_long, 2)
        return Bounds(firsts[kept], (firsts + lengths)[kept], count)
    assert long == "truncate"
    half = (length + 1) // 2
    most = np.maximum(half, length + 1 - both[:, ::-1])  # what the other one leaves, but at least half
    return Bounds(firsts, firsts + np.minimum(both, most).reshape(-1), count)


@dataclass(frozen=True)
class Packing:
    """`order`: document indices, sequence by sequence. `counts`: documents per sequence."""

    order: np.ndarray
    counts: np.ndarray

    def in_documents(self, each: int) -> "Packing":
        """The packing of documents, where each item is `each` consecutive ones."""
        return Packing((self.order[:, None] * each + np.arange(each)).reshape(-1), self.counts * each)


def pack_units(lengths: np.ndarray, capacity: int, each: int, *, together: bool) -> Packing:
    """Pack units of `each` consecutive documents, as many as fit, or each into a sequence of its own."""
    units = lengths.reshape(-1, each).sum(axis=1)
    alone = Packing(np.arange(len(units)), np.ones(len(units), dtype=np.int64))
    return (fit_documents(units, capacity) if together else alone).in_documents(each)


def fit_documents(lengths: np.ndarray, capacity: int) -> Packing:
    """Pack whole documents into sequences of at most `capacity` tokens, by best-fit decreasing bin packing.

    The longest document comes first, each into the fullest sequence it fits. The result is within 22% of the fewest
    sequences possible and usually within one. Sequences with the same free space are kept on a stack; a bit mask says
    which stacks are not empty, so that the tightest fit is the lowest set bit from the document's length upwards.
    Documents of equal length keep their order: the result is a function of `lengths` alone.
    """
    assert lengths.size == 0 or (lengths.min() > 0 and lengths.max() <= capacity)
    by_size = np.argsort(-lengths.astype(np.int64), kind="stable")
    sizes = lengths[by_size]
    assigned = np.empty(lengths.size, dtype=np.int64)  # the sequence of each document, in the order of `by_size`
    with_room: list[list[int]] = [[] for _ in range(capacity)]
    occupied = sequences = 0
    for at in range(0, lengths.size, _DOCUMENTS_AT_ONCE):
        chosen = []
        for size in sizes[at : at + _DOCUMENTS_AT_ONCE].tolist():
            fitting = occupied >> size
            if fitting:
                room = size + (fitting & -fitting).bit_length() - 1
                index = with_room[room].pop()
                if not with_room[room]:
                    occupied ^= 1 << room
            else:
                room, index = capacity, sequences
                sequences += 1
            left = room - size
            if left:
                with_room[left].append(index)
                occupied |= 1 << left
            chosen.append(index)
        assigned[at : at + len(chosen)] = chosen
    order = by_size[np.argsort(assigned, kind="stable")]
    return Packing(order, np.bincount(assigned, minlength=sequences))
