"""A curve as text: dots in Braille characters, two by four in each."""

import math
from collections.abc import Sequence

Point = tuple[float, float]
# The bits of the dots of a Braille character, by row from the top and by column.
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
BLANK = 0x2800


def draw_curve(points: Sequence[Point], width: int, height: int, *, ascii_only: bool = False) -> list[str]:
    """`height` lines of `width` characters; empty without points. The lowest value is at the bottom. `ascii_only`: with
    asterisks, for a terminal that has no Braille."""
    known = [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
    if not known:
        return []
    columns, rows = 2 * width, 4 * height
    left, right = min(x for x, _ in known), max(x for x, _ in known)
    low, high = min(y for _, y in known), max(y for _, y in known)
    cells = [[0] * width for _ in range(height)]
    before: tuple[int, int] | None = None
    for x, y in known:
        column = round((x - left) / (right - left) * (columns - 1)) if right > left else 0
        row = round((high - y) / (high - low) * (rows - 1)) if high > low else rows // 2
        for at, down in _line(before or (column, row), (column, row)):
            cells[down // 4][at // 2] |= DOTS[down % 4][at % 2]
        before = (column, row)
    if ascii_only:
        return ["".join("*" if bits else " " for bits in line) for line in cells]
    return ["".join(chr(BLANK + bits) for bits in line) for line in cells]


def _line(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """The dots between two."""
    steps = max(abs(end[0] - start[0]), abs(end[1] - start[1]), 1)
    return [
        (round(start[0] + (end[0] - start[0]) * i / steps), round(start[1] + (end[1] - start[1]) * i / steps))
        for i in range(steps + 1)
    ]


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """At most `most` points, each the mean of its neighbours; the last one is kept."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / (most - 1))
    groups = [points[first : first + size] for first in range(0, len(points), size)]
    means = [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]
    return [*means[:-1], points[-1]] if means[-1][0] == points[-1][0] else [*means, points[-1]]
