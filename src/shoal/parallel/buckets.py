"""Group tensors into buckets of bounded size, so that one collective communicates many."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_buckets(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Consecutive items whose sizes sum to at most `most`; a larger item gets a bucket of its own."""
    bucket: list[Item] = []
    filled = 0
    for item in items:
        if bucket and filled + size(item) > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += size(item)
    if bucket:
        yield bucket
