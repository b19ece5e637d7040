"""Validation, with actionable error messages."""

import types
from collections.abc import Mapping, Sequence
from functools import cache
from math import inf
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from shoal.config.foreign_keys import our_key
from shoal.config.locate import FileLine, KeyPath, Origin, Origins, Override
from shoal.config.schema import Block, Config, blocks_in, every_key, key_name
from shoal.config.shorthand import SHORTHANDS
from shoal.config.unbuilt import is_built
from shoal.config.words import dotted, shown
from shoal.mistakes import UserMistake, nearest

QUOTES = " Put it in quotes."
MOST_SENTENCES = 50  # per error message
# Attributes of the bounds in annotated_types, also used in the context of pydantic's errors.
_BOUNDS = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def validate(given: Mapping[str, Any], origins: Origins, *, needs_model: bool = True, planned: bool = False) -> Config:
    """The config that `given` describes, or a UserMistake with one line for each error, in which values that can only
    be forecast are named if it is `planned`."""
    try:
        return Config.model_validate(given, context={"needs_model": needs_model})
    except ValidationError as error:
        raise UserMistake("\n".join(_sentences(error, given, origins, planned=planned))) from error


def closest(name: str, choices: list[str]) -> str:
    """A suggestion of the one closest name, for the end of a message."""
    return "".join(f" Did you mean {choice}?" for choice in nearest(name, choices, limit=1))


def _sentences(
    error: ValidationError, given: Mapping[str, Any], origins: Origins, *, planned: bool = False
) -> list[str]:
    found = problems(error, given, origins, planned=planned)
    sentences = [sentence for _, sentence in found[:MOST_SENTENCES]]
    more = len(found) - len(sentences)
    return [*sentences, f"There are {more:,} more such mistakes."] if more else sentences


def problems(
    error: ValidationError, given: Mapping[str, Any], origins: Origins, *, planned: bool = False
) -> list[tuple[KeyPath, str]]:
    """The keys that do not pass validation, in reading order, each with a sentence."""
    by_path: dict[KeyPath, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False, include_input=False):
        # A default that depends on an invalid key is not a second mistake.
        if details["type"] != "default_factory_not_called":
            by_path.setdefault(_path_in(given, details["loc"]), []).append(details)
    # When a key may be a word or a block, pydantic reports both as failed; the error inside the block says more.
    around = {path[:length] for path in by_path for length in range(len(path))}
    innermost = [
        (inner, errors)
        for path, errors in by_path.items()
        if path not in around
        for inner in (_foreign_keys(path, _at(given, path)) if _is_unknown(errors) else [path])
    ]
    innermost.sort(key=lambda item: _reading_order(origins.find(item[0])))
    return [(path, _sentence(path, errors, given, origins, planned=planned)) for path, errors in innermost]


def _is_unknown(errors: list[ErrorDetails]) -> bool:
    return any(details["type"] == "extra_forbidden" for details in errors)


def _foreign_keys(path: KeyPath, value: Any) -> list[KeyPath]:
    """What to speak of when `path` is unknown: itself, or the keys in that block that other tools have.

    So `training.seq_len` is answered with the key for seq_len, and not with a guess at what training may be.
    """
    if our_key(path) is not None or not isinstance(value, Mapping) or not value:
        return [path]
    inside = [_foreign_keys((*path, key), inner) for key, inner in value.items()]
    answered = [key for keys in inside for key in keys if our_key(key) is not None]
    return answered if all(any(our_key(key) is not None for key in keys) for keys in inside) else [path, *answered]


def _at(given: Any, path: KeyPath) -> Any:
    for part in path:
        given = given[part]
    return given


def _reading_order(origin: Origin | None) -> tuple[bool, str, int]:
    """File by file and line by line; overrides after them, as they were typed."""
    return (False, origin.file, origin.line) if isinstance(origin, FileLine) else (True, "", 0)


def _path_in(given: Any, location: tuple[int | str, ...]) -> KeyPath:
    """Pydantic's location without the names of union members: only keys that exist in `given`."""
    path: list[str | int] = []
    for part in location:
        if (isinstance(given, Mapping) and part in given) or (
            isinstance(given, list | tuple) and isinstance(part, int) and part < len(given)
        ):
            path.append(part)
            given = given[part]  # type: ignore[index]  # the condition above has checked that it exists
    return tuple(path)


def _sentence(
    path: KeyPath, errors: list[ErrorDetails], given: Mapping[str, Any], origins: Origins, *, planned: bool
) -> str:
    kinds = {details["type"]: details for details in errors}
    if "contradiction" in kinds:
        context = kinds["contradiction"]["ctx"]
        keys: list[KeyPath] = [(*path, *key.split(".")) for key in context["keys"]]
        # An override was typed last, so it is the one most likely to be changed.
        keys.sort(key=lambda key: not isinstance(origins.places.get(key), Override))
        blamed = next((key for key in keys if key in origins.places), path)
        return f"{origins.prefix(blamed)}{context['sentence']}"
    if _is_unknown(errors):
        return f"{origins.prefix(path)}{dotted(path)} is not a key shoal knows{_meant(path)}"

    value = _at(given, path)
    must_be = _must_be(path, errors, value, planned=planned)
    origin = origins.find(path)
    if isinstance(origin, Override) and origin.path == path:
        key, _, typed = origin.text.partition("=")
        must_be = must_be.replace(QUOTES, f" In a shell: '{key}=\"{typed}\"'.")
        return f"{origin}: must be {must_be}"
    return f"{origins.prefix(path)}{dotted(path)} is {shown(value)}, but must be {must_be}"


def _meant(path: KeyPath) -> str:
    """What an unknown key was probably meant to be: the end of the sentence that says it is unknown."""
    name = str(path[-1])
    known = _known_keys()
    if len(path) == 1 and name in known:
        block, _, key = name.rpartition(".")
        return f". Write {key} inside the block {block}."
    if (ours := our_key(path)) is not None:
        return f": {ours}."
    namesakes = [key for key in known if key.rpartition(".")[2] == name]
    if namesakes:
        return f". Did you mean {' or '.join(namesakes[:3])}?"
    block_type = next(blocks_in(_type_at(path[:-1])), Config)
    return f".{closest(name, [key_name(*item) for item in block_type.model_fields.items()])}"


@cache
def _known_keys() -> tuple[str, ...]:
    return tuple(key for key, _ in every_key())


def _type_at(path: KeyPath) -> Any:
    """The type of the value at `path`."""
    annotation: Any = Config
    for part in path:
        if isinstance(part, str) and (block := next(blocks_in(annotation), None)):
            fields = {key_name(name, field): field for name, field in block.model_fields.items()}
            annotation = (fields.get(part) or block.model_fields[part]).annotation
        else:  # an item of a list, or a value of a mapping with free keys
            container = next(kind for kind in _members(annotation) if get_origin(kind) in (tuple, dict))
            annotation = get_args(container)[1 if isinstance(part, str) else 0]
    return annotation


def _members(annotation: Any) -> list[Any]:
    """The types a value may have: those of a union, unwrapped."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for member in get_args(annotation) for kind in _members(member)]
    if get_origin(annotation) is Annotated:
        return _members(get_args(annotation)[0])
    return [annotation]


def _text_in(annotation: Any) -> Any:
    """Of the types a value may have, the one that is text: a few words, or any."""
    return next((kind for kind in _members(annotation) if get_origin(kind) is Literal), str)


def _must_be(path: KeyPath, errors: list[ErrorDetails], value: Any, *, planned: bool) -> str:
    first = errors[0]
    if first["type"] == "unfit":
        return f"{first['msg']}."
    if first["type"] == "finite_number":
        return "a finite number."
    for limit, relation in _BOUNDS.items():
        if len(errors) == 1 and limit in first.get("ctx", {}):
            return f"{relation} {_number(first['ctx'][limit])}."

    annotation = _type_at(path)
    if path in SHORTHANDS:
        annotation = _text_in(_type_at((*path, SHORTHANDS[path]))) | annotation
    # Bounds are shown only where several types are possible, to tell them apart.
    key = (*path, SHORTHANDS[path]) if path in SHORTHANDS else path
    literals = [kind for kind in _members(annotation) if get_origin(kind) is Literal]
    words = [str(word) for kind in literals for word in get_args(kind)]
    unbuilt = {word for word in words if not planned and not is_built(key, word)}
    words = [word for word in words if word not in unbuilt]
    descriptions = _descriptions(annotation, with_bounds=len(errors) > 1, exceeds=_exceeds(value))
    choices = [description for description in descriptions if description not in unbuilt]
    hint = ""
    if isinstance(value, str) and words:
        hint = closest(value, words)
    elif str in _members(annotation) and float not in _members(annotation) and isinstance(value, int | float):
        hint = QUOTES
    elif int in _members(annotation) and isinstance(value, float) and value.is_integer():
        hint = f" Write {int(value)}."
    one_of = "one of " if len(choices) > 2 and len(choices) == len(words) else ""
    return f"{one_of}{_either(choices)}.{hint}"


def _exceeds(value: Any) -> float:
    """The number whose upper bounds are of interest: none but those that `value` exceeds."""
    return value if isinstance(value, int | float) else -inf


def _either(choices: list[str]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _descriptions(
    annotation: Any, with_bounds: bool = False, bounds: Sequence[Any] = (), exceeds: float = -inf
) -> list[str]:
    """The kinds of value this type accepts, each in a few words. Of upper bounds, only those below `exceeds`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [
            words for member in get_args(annotation) for words in _descriptions(member, with_bounds, exceeds=exceeds)
        ]
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _descriptions(inner, with_bounds, metadata, exceeds)
    if get_origin(annotation) is Literal:
        return [str(choice) for choice in get_args(annotation)]
    if get_origin(annotation) is tuple:
        items = [argument for argument in get_args(annotation) if argument is not Ellipsis]
        length = f"{len(items)} " if len(items) > 1 else ""
        item = _members(items[0])[0]
        if get_origin(item) is Literal:
            return [f"a list of {_either(_descriptions(item))}"]
        return [f"a list of {length}{ {str: 'strings', float: 'numbers'}.get(item, 'blocks') }"]
    if get_origin(annotation) is dict:
        return ["a mapping of patterns to numbers"]
    if annotation is bool:
        return ["true", "false"]
    if annotation in (None, types.NoneType):
        return ["null"]
    if isinstance(annotation, type) and issubclass(annotation, Block):
        return [f"a mapping such as {_example(annotation)}"]
    return [{int: "an integer", float: "a number", str: "a string"}[annotation] + _range(bounds, exceeds) * with_bounds]


def _example(block: type[Block]) -> str:
    """One key of a block with a value that it takes."""
    for name, field in block.model_fields.items():
        if type(field.default) in (int, float, str):
            return f"{{{key_name(name, field)}: {field.default}}}"
    return "{key: value}"


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


def _range(bounds: Sequence[Any], exceeds: float) -> str:
    parts = [
        f"{words} {_number(getattr(bound, limit))}"
        for bound in bounds
        for limit, words in _BOUNDS.items()
        if hasattr(bound, limit) and (limit in ("gt", "ge") or getattr(bound, limit) <= exceeds)
    ]
    return f" ({' and '.join(parts)})" if parts else ""
