"""`--like SYSTEM[@YEAR-MONTH]` and `--trait NAME=VALUE`: the system whose code a forecast is for."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from shoal.catalogue.gpus import Gpu
from shoal.config.schema_train import RecomputeConfig
from shoal.mistakes import UserMistake, suggestion
from shoal.plan.systems.earlier import Month, as_of, defaults_of, read_name
from shoal.plan.systems.further import FURTHER, FURTHER_DEFAULTS
from shoal.plan.systems.modelled import DEFAULTS, SYSTEMS
from shoal.plan.systems.traits import SystemTraits

NAMES: dict[str, SystemTraits] = {**SYSTEMS, **FURTHER}
ALL_DEFAULTS = {**DEFAULTS, **FURTHER_DEFAULTS}
WORDS, EMPTY = {"true": True, "false": False}, "empty"


@dataclass(frozen=True)
class Like:
    """A system by its name, the month of its libraries (None: today's), and traits that are given beside."""

    name: str
    date: Month | None = None
    given: tuple[tuple[str, Any], ...] = ()

    @property
    def defaults(self) -> dict[str, Any]:
        """Values of our keys that it has unless it is told otherwise."""
        return defaults_of(self.name, ALL_DEFAULTS.get(self.name, {}), self.date)

    @property
    def shown(self) -> str:
        parts = [] if self.date is None else [f"the libraries of {self.date[0]}-{self.date[1]:02}"]
        parts += [f"{name}={shown_value(value)}" for name, value in self.given]
        return " with ".join([self.name, *([", ".join(parts)] if parts else [])])

    def traits(self, gpu: Gpu, model_type: str) -> SystemTraits:
        found = NAMES[self.name]
        if self.date is not None:
            found = as_of(self.name, found, self.date, gpu=gpu, model_type=model_type)
        return replace(found, **dict(self.given))


def read_like(system: str, traits: Sequence[str] = ()) -> Like:
    """The values of `--like` and of every `--trait`."""
    name, date = read_name(system)
    if name not in NAMES:
        raise UserMistake(f"No system is called {name}.{suggestion(name, NAMES)} The names are {', '.join(NAMES)}.")
    if name == "shoal" and (date is not None or traits):
        raise UserMistake("shoal is forecast as it is: a month and --trait are for other systems, with --like SYSTEM.")
    return Like(name, date, tuple(_read_trait(one) for one in traits))


def _read_trait(given: str) -> tuple[str, Any]:
    name, equals, text = given.partition("=")
    kinds = get_type_hints(SystemTraits)
    if not equals and name in kinds:
        raise UserMistake(f"--trait {given} has no value. It may be {given}={', '.join(values_of(name))}.")
    if name not in kinds:
        raise UserMistake(
            f"--trait {given}: no trait is called {name}.{suggestion(name, kinds)} docs/traits.md has their "
            "names; write NAME=VALUE."
        )
    choices = _choices(kinds[name])
    value: Any = WORDS.get(text.lower(), text)
    if text == EMPTY and "" in choices:
        return name, ""
    if value in choices and type(value) in {type(one) for one in choices}:
        return name, value
    for number in (int, float):
        if number in choices:
            try:
                return name, number(text)
            except ValueError:
                continue
    shown = ", ".join(values_of(name))
    raise UserMistake(f"--trait {given}: {text or 'nothing'} is no value of {name}. It may be {shown}.")


def values_of(trait: str) -> list[str]:
    """The values that a trait may have, in words."""
    kinds = {int: "a whole number", float: "a number"}
    return [kinds.get(one, shown_value(one)) for one in _choices(get_type_hints(SystemTraits)[trait])]


def shown_value(value: Any) -> str:
    """A value of a trait as `--trait` reads it, or of a key as a config has it."""
    if isinstance(value, RecomputeConfig):
        return f"{{parts: [{', '.join(value.parts)}]}}"
    return str(value).lower() if isinstance(value, bool) else str(value) or EMPTY


def _choices(kind: Any) -> list[Any]:
    """The values that a trait may have: words, and the types of numbers."""
    if kind is bool:
        return [True, False]
    if get_origin(kind) is Literal:
        return list(get_args(kind))
    if kind in (int, float):
        return [kind]
    assert get_origin(kind) in (Union, type(int | str)), kind
    return [choice for one in get_args(kind) for choice in _choices(one)]
