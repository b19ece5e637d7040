"""Many tensors in few exchanges, each of a bounded size."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_buckets(items: Iterable[Item], size: Callable[[Item], int], most: int) -> Iterator[list[Item]]:
    """Neighbours together as long as their sizes add up to at most `most`; what is larger than that goes alone."""
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
