"""Which row stands at global position i: a pure function of seed, epoch, i and the number of rows.

No list of rows is ever held: a keyed permutation is computed where it is asked for, so a run resumes at any position,
on any number of ranks, at no cost.
"""

import hashlib
import math
from collections.abc import Sequence

import numpy as np

from shoal.mistakes import UserMistake

_ROUNDS = 10  # four make a good shuffle of large sets; small ones have halves of a bit or two and need more


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where each position goes under the permutation of [0, size) that `key` names. One key, one bijection.

    A Feistel network permutes the next power of two; what lands outside [0, size) is sent through again until it lands
    inside (cycle walking), which is less than one more time on average.
    """
    assert size >= 1
    values = np.atleast_1d(np.asarray(positions)).astype(np.uint64)
    assert values.size == 0 or int(values.max()) < size
    bits = (size - 1).bit_length()
    round_keys = _mix(np.arange(_ROUNDS, dtype=np.uint64) + np.uint64(key & 0xFFFFFFFFFFFFFFFF))
    values = _network(values, bits, round_keys)
    outside = np.flatnonzero(values >= size)
    while outside.size:
        moved = _network(values[outside], bits, round_keys)
        values[outside] = moved
        outside = outside[moved >= size]
    return values.astype(np.int64)


def _network(values: np.ndarray, bits: int, round_keys: np.ndarray) -> np.ndarray:
    # The halves may differ in width: each round changes one half by a function of the other, which undoes itself
    # whatever the function is, and that is all a bijection needs.
    low_bits = np.uint64(bits // 2)
    low_mask = np.uint64((1 << (bits // 2)) - 1)
    high_mask = np.uint64((1 << (bits - bits // 2)) - 1)
    low, high = values & low_mask, values >> low_bits
    for number, key in enumerate(round_keys):
        if number % 2:
            low = low ^ (_mix(high ^ key) & low_mask)
        else:
            high = high ^ (_mix(low ^ key) & high_mask)
    return (high << low_bits) | low


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64 bits so that each depends on all (the finaliser of splitmix64). Overflow is meant: modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def _key(*parts: object) -> int:
    """A key of its own for each use, so that the epochs of one seed are not those of the next, shifted."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


Spans = Sequence[tuple[int, int]]  # (first position, number of positions)


def around(first: int, count: int, left_out: Spans) -> list[tuple[int, int]]:
    """Where the `count` positions from the `first` on really are, when those in `left_out` are stepped over."""
    found = []
    for start, length in left_out:
        if first >= start:
            first += length
        elif count and first + count > start:
            found.append((first, start - first))
            count -= start - first
            first = start + length
    return [*found, (first, count)] if count else found


class Order:
    """The order of `rows` rows for one seed: those held out, and the endless sequence of the others.

    `validation` is the share held out (0: none). With validation data of its own, give the number of its rows as
    `separate` instead: then every row here is for training, and `validation_sequences` counts through the other set.
    """

    def __init__(self, rows: int, seed: int, validation: float = 0.0, separate: int | None = None) -> None:
        if rows < 1:
            raise UserMistake("There are no rows to train on. Check data.path.")
        if separate is not None and validation:
            raise ValueError("validation is a share or a separate set, not both")
        if not 0 <= validation < 1:
            raise UserMistake(
                f"data.validation {validation} is not a share of the rows. Give a number from 0 up to, not "
                "including, 1, or a path."
            )
        held = 0
        if validation:
            if rows == 1:
                raise UserMistake(
                    "The data makes a single row, which cannot be both trained on and held out. Set "
                    "data.validation: 0, give more data, or lower data.max_length."
                )
            # 0.1 × 30 is a little more than 3 in floating point, and must not hold out 4.
            held = min(max(math.ceil(validation * rows - 1e-9), 1), rows - 1)
        self.rows = rows
        self.seed = seed
        self.held_out = held
        self.training_count = rows - held
        self.validation_count = held if separate is None else separate
        self._separate = separate is not None
        self._split_key = _key("shoal", "validation", seed)

    def training_sequences(self, first_position: int, count: int, left_out: Spans = ()) -> np.ndarray:
        """The rows at `count` global positions from `first_position` on, through as many epochs as that takes.

        Positions in `left_out` (in order, not overlapping) are not counted: see `around`.
        """
        spans = around(first_position, count, left_out)
        return np.concatenate([np.empty(0, dtype=np.int64), *(self._rows_at(*span) for span in spans)])

    def _rows_at(self, first_position: int, count: int) -> np.ndarray:
        assert first_position >= 0
        assert count >= 0
        pieces = []
        position, stop = first_position, first_position + count
        while position < stop:
            epoch, index = divmod(position, self.training_count)
            taken = min(stop - position, self.training_count - index)
            indices = np.arange(index, index + taken)
            shuffled = permute(indices, self.training_count, _key("shoal", "epoch", self.seed, epoch))
            pieces.append(self._after_held_out(shuffled))
            position += taken
        return np.concatenate(pieces)

    def validation_sequences(self) -> np.ndarray:
        """The rows held out, in the order they are evaluated; numbers of the separate set where there is one."""
        if self._separate:
            return np.arange(self.validation_count, dtype=np.int64)
        return permute(np.arange(self.held_out), self.rows, self._split_key)

    def _after_held_out(self, indices: np.ndarray) -> np.ndarray:
        # One fixed permutation splits the rows: its first `held_out` places are held out, the others train.
        return permute(indices + self.held_out, self.rows, self._split_key) if self.held_out else indices
