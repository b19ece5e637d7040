"""What the command line's parser does for the command, done for a program's arguments."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from shoal.mistakes import UserMistake, suggestion

Item = TypeVar("Item")


def as_list(given: Sequence[Item]) -> list[Item]:
    """A single item stands for a list of one; a string is an item, and not a list of its characters."""
    if isinstance(given, str | os.PathLike) or not isinstance(given, Iterable):
        return [given]  # type: ignore[list-item]
    return list(given)


def check_choice(name: str, given: Any, choices: Sequence[Any]) -> None:
    if given not in choices:
        shown = ", ".join(map(str, choices))
        raise UserMistake(f"{name} {given} is not one of {shown}.{suggestion(str(given), map(str, choices))}")


def check_at_least(name: str, given: int | None, least: int) -> None:
    if given is not None and given < least:
        raise UserMistake(f"{name} {given} must be at least {least}.")


def check_hooks(hooks: Any) -> None:
    """A UserMistake unless `hooks` is a list of objects."""
    if isinstance(hooks, type) or not isinstance(hooks, Iterable):
        raise UserMistake(f"hooks is a list of hooks, not {_described(hooks)}: write hooks=[…].")
    for hook in hooks:
        check_object("hooks", hook)


def check_object(name: str, given: Any) -> None:
    if isinstance(given, type):
        raise UserMistake(f"{name} has the class {given.__name__}: give an object of it, {given.__name__}().")


def _described(given: Any) -> str:
    return f"the class {given.__name__}" if isinstance(given, type) else f"a {type(given).__name__}"
