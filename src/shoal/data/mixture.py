"""Several sources mixed by weight: their sequences as one set, and one global order over them.

The source at a position is a function of the weights and the position alone, so a mixture resumes anywhere, on any
number of ranks, as a single source does.
"""

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from shoal.data.order import Order, StreamState, key_of, permute
from shoal.data.sequences import DOCUMENT, Sequences, Summary


class MixedSequences(Sequences):
    """The sequences of several sources. Sequence j of source k of K has the number j · K + k, so that no source needs
    to know how many the others have."""

    def __init__(self, parts: Sequence[Sequences], summary: Summary) -> None:
        self._parts = parts
        self.summary = summary

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        local, source = divmod(int(index), len(self._parts))
        part = self._parts[source]
        tokens, flags = part[local]
        if self.separate and not part.separate:
            # Here documents attend to each other: to the attention mask they are one.
            flags = flags & ~np.uint8(DOCUMENT)
            flags[0] |= DOCUMENT
        return tokens, flags

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self._each(indices, lambda part, local: part.lengths(local))

    def loss_tokens(self, indices: np.ndarray) -> np.ndarray:
        return self._each(indices, lambda part, local: part.loss_tokens(local))

    def values(self, index: int) -> np.ndarray | None:
        local, source = divmod(int(index), len(self._parts))
        return self._parts[source].values(local)

    def _each(self, indices: np.ndarray, count: Callable[[Sequences, np.ndarray], np.ndarray]) -> np.ndarray:
        local, source = np.divmod(indices, len(self._parts))
        found = np.empty(indices.shape, dtype=np.int64)
        for number, part in enumerate(self._parts):
            here = source == number
            found[here] = count(part, local[here])
        return found


class MixedOrder(Order):
    """An order over several orders, each of which advances at its own rate.

    Item j of a source is due at time (j + ½) / rate, and the items of all sources follow each other by time. After any
    number of positions each source has had its share to within a sequence or two. With `repeat` a source that runs out
    starts its next epoch, and an epoch of the mixture is over when the last source has been read once. Without, a
    source that runs out drops out until all have, so that an epoch has every sequence once.
    """

    def __init__(
        self,
        orders: Sequence[Order],
        rates: Sequence[float],
        *,
        seed: int,
        repeat: bool,
        separate: int | None = None,
    ) -> None:
        self._orders = orders
        self._rates = np.asarray(rates, dtype=np.float64) / sum(rates)
        counts = [order.training_count for order in orders]
        sizes = [order.sequences for order in orders]
        self.sequences = None if None in sizes else sum(size for size in sizes if size is not None)
        known = [count for count in counts if count is not None]
        self._limits = np.array([np.inf] * len(orders) if repeat else known, dtype=np.float64)
        assert repeat or len(known) == len(orders), "an epoch of streamed data has no known length"
        if len(known) < len(orders):
            self.training_count = None
        elif repeat:
            # Up to the last of all first epochs; of items at the same time, those of earlier sources come first.
            time, last = max((self._time(source, count - 1), source) for source, count in enumerate(known))
            before = self._counts(time)
            same = sum(self._time(source, int(before[source])) == time for source in range(last))
            self.training_count = int(before.sum()) + same + 1
        else:
            self.training_count = sum(known)
        self._repeat = repeat
        self._seed = seed
        self._separate = separate
        self.validation_count = sum(order.validation_count for order in orders) if separate is None else separate
        # Of the positions of an epoch, or of any stretch of an endless mixture.
        self.shares = self._rates if repeat else self._limits / self._limits.sum()

    def sequences_at(self, first_position: int, count: int) -> np.ndarray:
        if self._repeat:
            return self._interleaved(first_position, count, epoch=0)
        assert self.training_count is not None
        parts = [np.empty(0, dtype=np.int64)]
        position, stop = first_position, first_position + count
        while position < stop:
            epoch, index = divmod(position, self.training_count)
            taken = min(stop - position, self.training_count - index)
            parts.append(self._interleaved(index, taken, epoch))
            position += taken
        return np.concatenate(parts)

    def validation_sequences(self) -> np.ndarray:
        """Shuffled over the sources, so that the first ones, to which an evaluation may be limited, are of all."""
        if self._separate is not None:
            return np.arange(self._separate)
        found = np.concatenate(
            [self._number(source, order.validation_sequences()) for source, order in enumerate(self._orders)]
        )
        if not len(found):
            return found
        shuffled: np.ndarray = found[permute(np.arange(len(found)), len(found), key_of("shoal", "mixed", self._seed))]
        return shuffled

    def state(self, position: int) -> StreamState:
        if self.training_count is not None:
            return []
        before = self.positions_before(position)
        return [one for order, at in zip(self._orders, before, strict=True) for one in order.state(at)]

    def restore(self, state: StreamState, position: int) -> None:
        if self.training_count is None:
            states = [[one] for one in state] or [[] for _ in self._orders]
            for order, one, at in zip(self._orders, states, self.positions_before(position), strict=True):
                order.restore(one, at)

    def positions_before(self, position: int) -> list[int]:
        """How many sequences of each source come before `position` of an endless mixture."""
        before, sources, _ = self._around(position, 1)
        skipped = np.bincount(sources[: position - int(before.sum())], minlength=len(self._orders))
        return [int(count) for count in before + skipped]

    def times_read(self, source: int) -> float:
        """How often an epoch has each training sequence of a source."""
        count = self._orders[source].training_count
        assert count is not None
        assert self.training_count is not None
        return self.positions_before(self.training_count)[source] / count if self._repeat else 1.0

    def _interleaved(self, first: int, count: int, epoch: int) -> np.ndarray:
        sources, items = self._window(first, count)
        found = np.empty(count, dtype=np.int64)
        for source, order in enumerate(self._orders):
            here = np.flatnonzero(sources == source)
            if len(here):
                begin = int(items[here[0]]) + epoch * int(self._limits[source] if epoch else 0)
                found[here] = self._number(source, order.sequences_at(begin, len(here)))
        return found

    def _number(self, source: int, local: np.ndarray) -> np.ndarray:
        numbered: np.ndarray = local * len(self._orders) + source
        return numbered

    def _window(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The source of each of `count` positions from `first` on, and its item."""
        before, sources, items = self._around(first, count)
        here = slice(first - int(before.sum()), first - int(before.sum()) + count)
        return sources[here], items[here]

    def _around(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Some items by time, among which those at `count` positions from `first` on are: how many of each source come
        before them, the source of each, and its number there."""
        begin = self._time_before(first)
        before, after = self._counts(begin), self._counts(self._time_after(first + count, begin))
        sources = np.repeat(np.arange(len(self._orders)), (after - before).astype(np.int64))
        items = np.concatenate([np.arange(low, high) for low, high in zip(before, after, strict=True)])
        by_time = np.lexsort((sources, (items + 0.5) / self._rates[sources]))
        return before, sources[by_time], items[by_time].astype(np.int64)

    def _time(self, source: int, item: int) -> float:
        return float((item + 0.5) / self._rates[source])

    def _counts(self, time: float) -> np.ndarray:
        """The number of items of each source that are due before `time`."""
        counts = np.maximum(np.ceil(time * self._rates - 0.5), 0)
        # Rounding may be off by one; what counts is the comparison that `_window` sorts by.
        counts -= (counts > 0) & ((counts - 0.5) / self._rates >= time)
        counts += (counts + 0.5) / self._rates < time
        due: np.ndarray = np.minimum(counts, self._limits)
        return due

    def _time_before(self, position: int) -> float:
        """A time before which at most `position` items are due, and not many fewer."""
        low, high = 0.0, self._time_after(position + 1, 0.0)
        for _ in range(64):
            middle = (low + high) / 2
            if self._counts(middle).sum() <= position:
                low = middle
            else:
                high = middle
        return low

    def _time_after(self, position: int, begin: float) -> float:
        """A time before which at least `position` items are due."""
        step = 1.0
        while self._counts(begin + step).sum() < position:
            step *= 2
        return begin + step


def rates_of(parts: Sequence[Sequences], weights: Sequence[float], by: str) -> list[float]:
    """Sequences of each source per unit of weight: weights are shares of tokens, or of examples."""
    if by == "examples":
        per_sequence = [part.summary.documents / part.summary.sequences for part in parts]
    else:
        per_sequence = [part.summary.mean_length for part in parts]
    return [weight / amount for weight, amount in zip(weights, per_sequence, strict=True)]


def summarize(parts: Sequence[Sequences], weights: Sequence[float], mixing: object) -> Summary:
    """The statistics of all sources together."""
    summaries = [part.summary for part in parts]

    def total(key: str) -> int:
        return sum(getattr(one, key) for one in summaries)

    labels = sum(one.loss_tokens / one.loss_token_share for one in summaries)
    described = [[one.content for one in summaries], list(weights), str(mixing)]
    return Summary(
        format=" + ".join(dict.fromkeys(one.format for one in summaries)),
        joined=all(one.joined for one in summaries),
        separate=any(one.separate for one in summaries),
        documents=total("documents"),
        tokens=total("tokens"),
        sequences=total("sequences"),
        longest=max(one.longest for one in summaries),
        loss_tokens=total("loss_tokens"),
        loss_token_share=total("loss_tokens") / labels,
        content=hashlib.sha256(json.dumps(described).encode()).hexdigest(),
        truncated=total("truncated"),
        dropped=total("dropped"),
        empty=total("empty"),
        skipped=total("skipped"),
        first_skipped=next((one.first_skipped for one in summaries if one.first_skipped), None),
        pairs=all(one.pairs for one in summaries),
        encoder=all(one.encoder for one in summaries),
        desirable=None if any(one.desirable is None for one in summaries) else total("desirable"),
    )
