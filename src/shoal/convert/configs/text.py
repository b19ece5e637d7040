"""The report of a translation as text."""

from collections.abc import Iterator
from typing import Any

from shoal.config.words import shown
from shoal.convert.configs.draft import BECAME, NO_MEANING, NOT_CARRIED, Line
from shoal.convert.configs.translation import Translation

WIDEST = 58  # characters of the left column


def report(translation: Translation) -> str:
    """What each key became, what has no meaning here, what could not be carried."""
    return "\n".join(_lines(translation))


def _lines(translation: Translation) -> Iterator[str]:
    yield from translation.systems
    became = translation.of(BECAME)
    if became:
        yield from ("", "became")
        yield from _columns([(_theirs(line), _ours(line)) for line in became])
    if dropped := translation.of(NO_MEANING):
        yield from ("", "has no meaning here")
        yield from _columns(_by_reason(dropped))
    if lost := translation.of(NOT_CARRIED):
        yield from ("", "could not be carried")
        yield from _columns([(_theirs(line), line.says) for line in lost])
    if translation.contradictions:
        yield from ("", "contradictions", *(f"  {one}" for one in translation.contradictions))
    if translation.remarks:
        yield from ("", "note", *(f"  {one}" for one in translation.remarks))
    if translation.missing:
        them = "it" if len(translation.missing) == 1 else "them"
        yield from (
            "",
            f"missing: {', '.join(translation.missing)}; set {them} in the file, or behind it: "
            + " ".join(f"{key}=…" for key in translation.missing),
        )


def _theirs(line: Line) -> str:
    return f"{line.key}: {_value(line.value)}" + (" (default)" if line.default else "")


def _ours(line: Line) -> str:
    named = ", ".join(f"{key}: {_value(value)}" for key, value in line.ours)
    return f"{named} ({line.says})" if line.says else named


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value and len(value) <= 60 else shown(value)


def _by_reason(lines: list[Line]) -> list[tuple[str, str]]:
    """One entry per reason, with all keys that have it."""
    found: dict[str, list[str]] = {}
    for line in lines:
        found.setdefault(line.says, []).append(line.key)
    return [(", ".join(keys), why) for why, keys in found.items()]


def _columns(rows: list[tuple[str, str]]) -> Iterator[str]:
    width = min(WIDEST, max(len(left) for left, _ in rows))
    for left, right in rows:
        if len(left) <= width:
            yield f"  {left:<{width}}  {right}"
        else:
            yield f"  {left}"
            yield f"  {'':<{width}}  {right}"
