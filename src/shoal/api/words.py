"""Mistakes in the words of Python: they are written for the command, and name its options."""

import re
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from shoal.mistakes import RunFailed, UserMistake

Given = ParamSpec("Given")
Result = TypeVar("Result")

# Options whose argument has another name.
ARGUMENTS = {"from": "start_from", "list": "listed", "optuna": "trials", "like": "system"}
# A command of a terminal stays as it is. An option may have a value: a number, or a word after "with", "use" and such.
COMMAND = r"(?:shoal|torchrun|litgpt|lm-eval) [a-z][^;,]*"
OPTION = re.compile(
    rf"(?P<command>{COMMAND})|(?P<before>\b(?:add|give|or|use|with) )?--(?P<name>[a-z][a-z-]*)"
    r"(?P<value> [\w/.-]*\w)?(?P<ends>(?=[,;]|\.$|\. |$))?"
)


def naming_arguments(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """`function`, whose mistakes name its arguments where those of the command name options. The command prints them
    as they were (`as_typed`)."""

    @wraps(function)
    def called(*given: Given.args, **named: Given.kwargs) -> Result:
        try:
            return function(*given, **named)
        except (UserMistake, RunFailed) as told:
            told.args = (for_python(str(told), signature(function).parameters), *told.args[1:])
            raise

    return called


def for_python(sentence: str, parameters: Mapping[str, Parameter]) -> str:
    """`sentence` with `resume=True` for --resume, and `output=…` for --output, where these are `parameters`."""

    def reworded(found: re.Match[str]) -> str:
        name = ARGUMENTS.get(found["name"] or "", (found["name"] or "").replace("-", "_"))
        if found["command"] or name not in parameters:
            return found[0]
        before, value = found["before"] or "", found["value"] or ""
        if "bool" in str(parameters[name].annotation):
            return f"{before}{name}=True{value}"
        word, ends = value.strip(), found["ends"] is not None
        if re.fullmatch(r"-?[\d.]+|[A-Z]+", word):
            return f"{before}{name}={word}"
        if word and before and (ends or "/" in word):
            return f"{before}{name}={word!r}"
        return f"{before}{name}{'=…' if ends and not word else value}"

    return OPTION.sub(reworded, sentence)
