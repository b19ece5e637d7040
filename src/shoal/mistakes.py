"""What the user can mend and what not, as exceptions, and how a mistake names what was probably meant."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserMistake(Exception):
    """A sentence that says what was found, where, and what to do. Commands print it and exit with status 2."""


def nearest(name: str, choices: Iterable[str], limit: int = 3) -> list[str]:
    """The few `choices` most like `name`, best first; empty when nothing is close."""
    known = {choice.lower(): choice for choice in choices}
    return [known[match] for match in get_close_matches(name.lower(), known, n=limit, cutoff=0.5)]


def suggestion(name: str, choices: Iterable[str]) -> str:
    """' Did you mean a or b?', or nothing: made to be put at the end of a sentence."""
    matches = nearest(name, choices)
    return f" Did you mean {' or '.join(matches)}?" if matches else ""


class RunFailed(Exception):
    """The run failed, and not by a mistake of the user's: the message says how, and the command exits with status 1."""
