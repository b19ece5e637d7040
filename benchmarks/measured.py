"""Write measured figures into README.md and docs/: `python -m benchmarks.measured`.

benchmarks/figures has the lines of each page, with {} where a figure is, and the committed result that it comes from. A
line is found by its words, across line breaks; only its figures are written. `--check` writes nothing and says what
would change.
"""

import re
import sys
from pathlib import Path

from benchmarks.figures.pages import PAGES
from benchmarks.figures.results import Line

ROOT = Path(__file__).parents[1]
FIGURE = r"(\d(?:[\d.,]*\d)?)"


def refreshed(text: str, lines: list[Line]) -> str:
    """The text of a page with the figures of today's results."""
    for words, figures in lines:
        found = list(pattern(words).finditer(text))
        if len(found) != 1:
            raise SystemExit(f"{len(found)} places, not one, have these words: {words}")
        start, parts = found[0].start(), found[0].groups()
        between = parts[::2]
        if words.count("{}") != len(figures):
            raise SystemExit(f"{words.count('{}')} figures are in these words, {len(figures)} are given: {words}")
        new = "".join(one for pair in zip(between, [*figures, ""], strict=True) for one in pair)
        text = text[:start] + new + text[found[0].end() :]
    return text


def pattern(words: str) -> re.Pattern[str]:
    """Groups: the words before, between and after the figures, and the figures."""
    literal = (r"\s+".join(map(re.escape, re.split(r"\s+", part))) for part in words.split("{}"))
    return re.compile(FIGURE.join(f"({part})" for part in literal))


def main() -> None:
    changed = []
    for name, lines in PAGES.items():
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        if (new := refreshed(text, lines())) != text:
            changed.append(name)
            if "--check" not in sys.argv:
                page.write_text(new, encoding="utf-8")
    print("\n".join(changed) or "every figure is that of its result")


if __name__ == "__main__":
    main()
