"""Progress of long work, in sentences: how much is done, how fast, and how long it still takes."""

import time
from collections.abc import Callable


class Progress:
    """Reports after two seconds and then every ten: quick work prints nothing."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._next = time.monotonic() + 2
        self._began = time.monotonic()

    def begin(self) -> None:
        """Rates count from now: another kind of work begins."""
        self._began = time.monotonic()

    def tick(self, doing: str, count: int, unit: str, share: float | None = None) -> None:
        """`count` units are done, `share` of all of them where that is known."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + 10
        seconds = max(now - self._began, 1e-9)
        measure = f" {unit}" if unit.isupper() else ""  # 3.9 MB/s, but 8,400/s of documents
        sentence = f"{doing}: {count:,} {unit} ({shorten(count / seconds)}{measure}/s)"
        if share is not None and 0 < share <= 1:
            sentence += f", {duration(seconds * (1 - share) / share)} left"
        self._report(sentence + ".")


def shorten(rate: float) -> str:
    """Three digits of a rate are as many as it deserves: 8,400."""
    if rate < 10:
        return f"{rate:.1f}"
    digits = max(len(str(int(rate))) - 3, 0)
    return f"{round(rate, -digits):,.0f}"


def duration(seconds: float) -> str:
    """A remaining time: `31 s`, `12 min`, `3 h 20 min`."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
