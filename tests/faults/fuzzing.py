"""Many seeded random cases in one test: their number, their limits, and all of their failures."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from types import FrameType

import pytest

from shoal.mistakes import UserMistake

SECONDS = 5  # that one case may take
# A thirteenth of the cases runs in `make test`, the others with the slow tests. Thirteen is odd, so that both kinds of
# cases that alternate are in each part.
PARTS = pytest.mark.parametrize(
    "part", [pytest.param("a thirteenth"), pytest.param("the others", marks=pytest.mark.slow)]
)


class TookTooLong(BaseException):
    """Not an `Exception`, so that no handler takes it for a damaged file."""


@contextmanager
def limited() -> Iterator[None]:
    """Limit CPU time, because the machine is shared, and wall time, for code that waits."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise TookTooLong

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, SECONDS), (signal.SIGALRM, signal.ITIMER_REAL, 12 * SECONDS))
    before = [signal.signal(number, expire) for number, _, _ in clocks]
    for _, clock, seconds in clocks:
        signal.setitimer(clock, seconds)
    try:
        yield
    finally:
        for (number, clock, _), handler in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


def problems_of(cases: int, part: str, kind: str, attempt: Callable[[Random, int], None]) -> list[str]:
    """All failures by case, because one often hides another."""
    found = []
    for number in (one for one in range(cases) if (one % 13 == 0) == (part == "a thirteenth")):
        try:
            with limited():
                attempt(Random(f"{kind}/{number}"), number)
        except (Exception, TookTooLong) as error:
            found.append(f"{number}: {type(error).__name__}: {str(error)[:300]}")
    return found


def hold_sentence(mistake: UserMistake) -> None:
    text = str(mistake)
    assert text
    assert "Traceback" not in text
    assert text.strip().endswith((".", "?")) or ": " in text, text
