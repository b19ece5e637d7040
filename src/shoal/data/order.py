"""The order of sequences: which one is at global position i, as a pure function of seed, epoch, i and their number.

No index is stored: a keyed permutation is evaluated where it is needed, so a run resumes at any position, on any
number of ranks, at no cost.
"""

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from shoal.mistakes import UserMistake

_ROUNDS = 10  # four shuffle a large set well; in a small set the halves have a bit or two and need more


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Map each position through the permutation of [0, size) that `key` selects.

    A Feistel network permutes the next power of two; values outside [0, size) go through it again until they are
    inside (cycle walking), less than one more time on average.
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
    # The halves may differ in width: each round XORs one half with a function of the other, which is its own inverse
    # whatever the function, so the network is a bijection.
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
    """Mix 64 bits so that each depends on all (the finalizer of splitmix64). Overflow is intended: modulo 2^64."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = values ^ (values >> np.uint64(31))
    return mixed


def key_of(*parts: object) -> int:
    """A separate key for each use, so that the epochs of one seed are not the shifted epochs of another."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


Spans = Sequence[tuple[int, int]]  # (first position, number of positions)
StreamState = list[dict[str, int]]  # one for each streamed source


def around(first: int, count: int, left_out: Spans) -> list[tuple[int, int]]:
    """The spans of `count` positions starting at `first`, when positions in `left_out` are skipped and not counted."""
    found = []
    for start, length in left_out:
        if first >= start:
            first += length
        elif count and first + count > start:
            found.append((first, start - first))
            count -= start - first
            first = start + length
    return [*found, (first, count)] if count else found


def positions_around(first: int, count: int, left_out: Spans = ()) -> np.ndarray:
    """The `count` global positions starting at `first`: see `around`."""
    spans = around(first, count, left_out)
    return np.concatenate([np.empty(0, np.int64), *(np.arange(at, at + length) for at, length in spans)])


class Order(ABC):
    """Which sequence is at each global position of training, and which are held out."""

    sequences: int | None  # of all, with those held out; None: unknown, because the data is streamed
    training_count: int | None  # of an epoch
    validation_count: int

    def training_sequences(self, first_position: int, count: int, left_out: Spans = ()) -> np.ndarray:
        """The sequences at `count` global positions from `first_position` on, over as many epochs as needed.

        Positions in `left_out` (sorted, not overlapping) are not counted: see `around`.
        """
        spans = around(first_position, count, left_out)
        return np.concatenate([np.empty(0, dtype=np.int64), *(self.sequences_at(*span) for span in spans)])

    @abstractmethod
    def sequences_at(self, first_position: int, count: int) -> np.ndarray:
        """The sequences at `count` positions from `first_position` on."""

    @abstractmethod
    def validation_sequences(self) -> np.ndarray:
        """The held-out sequences, in evaluation order; indices into the separate set where there is one."""

    def state(self, position: int) -> StreamState:
        """What a checkpoint keeps so that the order continues at `position`: nothing, unless data is streamed."""
        return []

    def restore(self, state: StreamState, position: int) -> None:
        """Continue at `position`, which `state` was taken for. A stream without a state begins there."""
        return


class SequentialOrder(Order):
    """The order in which the samples are stored, epoch after epoch."""

    def __init__(self, samples: int) -> None:
        self.sequences: int | None = samples
        self.training_count: int | None = samples
        self.validation_count = 0
        self._samples = samples

    def sequences_at(self, first_position: int, count: int) -> np.ndarray:
        return np.arange(first_position, first_position + count, dtype=np.int64) % self._samples

    def validation_sequences(self) -> np.ndarray:
        return np.empty(0, dtype=np.int64)


class ShuffledOrder(Order):
    """The order of a number of `sequences` for one seed: which are held out, and the infinite order of the others.

    `validation` is the fraction held out (0: none). For a separate validation set, pass its number of sequences as
    `separate` instead: every sequence here is then for training, and `validation_sequences` indexes the other set.
    """

    def __init__(self, sequences: int, seed: int, validation: float = 0.0, separate: int | None = None) -> None:
        if sequences < 1:
            raise UserMistake("There are no sequences to train on. Check data.path.")
        if separate is not None and validation:
            raise ValueError("validation is a fraction or a separate set, not both")
        if not 0 <= validation < 1:
            raise UserMistake(
                f"data.validation {validation} is not a fraction. Give a number from 0 up to, not "
                "including, 1, or a path."
            )
        held = 0
        if validation:
            if sequences == 1:
                raise UserMistake(
                    "The data makes a single sequence, which cannot be both trained on and held out. Set "
                    "data.validation: 0, give more data, or lower data.max_length."
                )
            # 0.07 × 100 is a little more than 7 in floating point, and must not hold out 8.
            held = min(max(math.ceil(validation * sequences - 1e-9), 1), sequences - 1)
        self.sequences: int = sequences
        self.seed = seed
        self.held_out = held
        self.training_count: int = sequences - held
        self.validation_count = held if separate is None else separate
        self._separate = separate is not None
        self._split_key = key_of("shoal", "validation", seed)

    def sequences_at(self, first_position: int, count: int) -> np.ndarray:
        assert first_position >= 0
        assert count >= 0
        parts = []
        position, stop = first_position, first_position + count
        while position < stop:
            epoch, index = divmod(position, self.training_count)
            taken = min(stop - position, self.training_count - index)
            indices = np.arange(index, index + taken)
            shuffled = permute(indices, self.training_count, key_of("shoal", "epoch", self.seed, epoch))
            parts.append(self._after_held_out(shuffled))
            position += taken
        return np.concatenate(parts)

    def validation_sequences(self) -> np.ndarray:
        if self._separate:
            return np.arange(self.validation_count, dtype=np.int64)
        return permute(np.arange(self.held_out), self.sequences, self._split_key)

    def _after_held_out(self, indices: np.ndarray) -> np.ndarray:
        # One fixed permutation splits the data: its first `held_out` positions are held out, the others train.
        return permute(indices + self.held_out, self.sequences, self._split_key) if self.held_out else indices
