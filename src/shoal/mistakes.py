"""Exceptions for user mistakes and failed runs, and suggestions for misspelled names."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserMistake(Exception):
    """An error the user can fix. The message says what was found, where, and what to do; the exit status is 2."""


def nearest(name: str, choices: Iterable[str], limit: int = 3) -> list[str]:
    """Return the `choices` closest to `name`, best first; empty if none is close."""
    known = {choice.lower(): choice for choice in choices}
    return [known[match] for match in get_close_matches(name.lower(), known, n=limit, cutoff=0.5)]


def suggestion(name: str, choices: Iterable[str]) -> str:
    """Return ' Did you mean a or b?', or an empty string, to append to a sentence."""
    matches = nearest(name, choices)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


class RunFailed(Exception):
    """The run failed for another reason than a user mistake. The message says why; the exit status is 1."""


class RanksLost(RunFailed):
    """Ranks hung or were killed. The run can be resumed from its newest checkpoint."""


LONGEST_SHOWN = 200


def shortened(text: str) -> str:
    """`text` as it can be printed in a message: values may be of any length, and may hold lone surrogates."""
    printable = text.encode(errors="backslashreplace").decode()
    return printable if len(printable) <= LONGEST_SHOWN else f"{printable[:LONGEST_SHOWN]}…"
