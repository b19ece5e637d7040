"""PyTorch's caching allocator without expandable segments: c10/cuda/CUDACachingAllocator.cpp.

Requests of up to 1 MiB are served from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones from a
segment of their own, in multiples of 2 MiB. The smallest free block that is large enough is taken, split if more than
1 MiB would remain, and merged with its free neighbours in the segment when it is freed. Blocks never move. If the
device is full, segments without any block in use are returned to it.
"""

import math
from bisect import bisect_left, insort

MIB = 1 << 20


class Block:
    """A part of a segment, in use or free."""

    __slots__ = ("address", "after", "before", "free", "size")

    def __init__(self, address: int, size: int, before: "Block | None", after: "Block | None") -> None:
        self.address, self.size, self.before, self.after, self.free = address, size, before, after, False


NOTHING = Block(-1, 0, None, None)


class Allocator:
    """Segments and their blocks, which addresses only order. It has `limit` bytes; requests of up to `ignored` bytes do
    not count."""

    def __init__(self, limit: float = math.inf, ignored: float = 0.0) -> None:
        self._limit, self._ignored = limit, ignored
        self._small: list[tuple[int, int, Block]] = []  # free blocks by size and address
        self._large: list[tuple[int, int, Block]] = []
        self._of_small: set[int] = set()  # addresses of the blocks of small segments
        self._end = 0
        self._reserved = self.allocated = 0
        self.reserved = self.peak = 0  # the most of each so far

    def take(self, wanted: float) -> Block:
        if wanted <= self._ignored:
            return NOTHING
        size = -(-int(wanted) // 512) * 512 or 512
        small = size <= MIB
        free = self._small if small else self._large
        place = bisect_left(free, (size, -1))
        if place < len(free):
            block = free.pop(place)[2]
            block.free = False
        else:
            block = self._segment(
                2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            )
        left = block.size - size
        if left > MIB or (small and left >= 512):
            rest = Block(block.address + size, left, block, block.after)
            rest.free = True
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            insort(free, (left, rest.address, rest))
            if small:
                self._of_small.add(rest.address)
        if small:
            self._of_small.add(block.address)
        self.allocated += block.size
        if self.allocated > self.peak:
            self.peak = self.allocated
        return block

    def give(self, *blocks: Block) -> None:
        for block in blocks:
            if block is NOTHING:
                continue
            self.allocated -= block.size
            free = self._small if self._of_small and block.address in self._of_small else self._large
            following, preceding = block.after, block.before
            if following is not None and following.free:
                del free[bisect_left(free, (following.size, following.address))]
                self._join(block, following)
            if preceding is not None and preceding.free:
                del free[bisect_left(free, (preceding.size, preceding.address))]
                self._join(preceding, block)
                block = preceding
            block.free = True
            insort(free, (block.size, block.address, block))

    def _segment(self, size: int) -> Block:
        if self._reserved + size > self._limit:
            self._release()
        self._reserved += size
        self.reserved = max(self.reserved, self._reserved)
        self._end += size
        return Block(self._end - size, size, None, None)

    def _release(self) -> None:
        """Returns the segments that are free."""
        for free in (self._small, self._large):
            whole = [one for one in free if one[2].before is None and one[2].after is None]
            self._reserved -= sum(size for size, _, _ in whole)
            free[:] = [one for one in free if one[2].before is not None or one[2].after is not None]

    @staticmethod
    def _join(block: Block, following: Block) -> None:
        block.size += following.size
        block.after = following.after
        if block.after is not None:
            block.after.before = block


def left_beside(size: float) -> float:
    """Bytes of a segment that each of many tensors of `size` bytes leaves unused."""
    if size <= MIB:
        return 0.0
    if size < 10 * MIB:
        return 20 * MIB / (20 * MIB // size) - size
    return -(-size // (2 * MIB)) * 2 * MIB - size
