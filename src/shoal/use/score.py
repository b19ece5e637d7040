"""Scores of generated answers: exact match, or a function of the user's."""

import importlib
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.mistakes import UserMistake, shortened, suggestion
from shoal.paths import user_path

# The answer that was generated, the one in the data, and the record; returns a number, 1 for a perfect answer.
Score = Callable[[str, str, Mapping[str, Any]], float]


def exact_match(answer: str, expected: str, record: Mapping[str, Any]) -> float:
    """1 if both are the same text, without the white space around them."""
    return float(answer.strip() == expected.strip())


def load_score(name: str, *, allow_code: bool) -> Score:
    """The function called `name`: module:function or file.py:function. That runs code, so it must be allowed."""
    place, _, function = name.rpartition(":")
    if not place or not function:
        raise UserMistake(f"--score {name} must be written as module:function or file.py:function.")
    if not allow_code:
        raise UserMistake(f"--score {name} runs code of {place}; add --allow-code if you trust it.")
    try:
        module = _load_file(place) if place.endswith(".py") else _load_module(place)
    except UserMistake:
        raise
    except Exception as error:  # whatever the code raises while it is imported
        raise UserMistake(f"--score {name} cannot be imported: {_described(error)}.") from None
    found = getattr(module, function, None)
    if not callable(found):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UserMistake(f"--score {name}: {place} has no function {function}.{suggestion(function, known)}")
    score: Score = found
    return score


def call_score(score: Score, name: str, answer: str, expected: str, record: Mapping[str, Any], where: str) -> float:
    """The score of one answer. What the user's function raises, or returns in place of a number, is a UserMistake."""
    try:
        value = score(answer, expected, record)
    except Exception as error:
        raise UserMistake(f"--score {name} failed for {where}: {_described(error)}.") from None
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise UserMistake(f"--score {name} returned {shortened(repr(value))} for {where}; it must return a number.")
    return number


def _load_file(name: str) -> ModuleType:
    file = user_path(name, "--score")
    if not file.is_file():
        raise UserMistake(f"--score: the file {name} does not exist (relative to {Path.cwd()}).")
    name = f"shoal_score_{file.stem}"  # not the name of an installed module
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    # As `python -m` does; the command's own folder is what a script has there.
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise UserMistake(
            f"--score: there is no module {name}; give one that Python finds from {Path.cwd()}, or a file.py:function."
        ) from None


def _described(error: Exception) -> str:
    return shortened(" ".join(f"{type(error).__name__}: {error}".split()).rstrip(".: "))
