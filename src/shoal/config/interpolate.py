"""`${another.key}` and `${oc.env:NAME}` in values: OmegaConf's interpolation, restricted to what cannot run code."""

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.config.locate import KeyPath, Origins
from shoal.config.schema import Config
from shoal.config.words import dotted, shown
from shoal.mistakes import UserMistake

_ALLOWED = re.compile(r"\$\{\s*(?:oc\.env\s*:\s*(?P<variable>\w+)\s*(?P<default>,[^{}$]*)?|[\w.\[\]-]+)\s*\}")
_ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\\\$\{")
_REFERENCE = re.compile(r"\$\{\s*(?P<up>\.*)(?P<key>[\w.\[\]-]*)\s*\}")
_KEY_PART = re.compile(r"[^.\[\]]+")
DEEPEST = 10  # defaults within defaults of `oc.env`
MOST_CHARACTERS = 200_000  # of all texts with references, once resolved


def strings_in(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Each text in a tree of values, with its path."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from strings_in(inner, (*path, key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from strings_in(inner, (*path, index))


def refuse_unsafe(value: Any, origins: Origins, above: KeyPath = ()) -> None:
    """Refuse every interpolation but a reference to a key and `oc.env`, before OmegaConf sees them.

    OmegaConf's `oc.coerce` imports a module named in the text, so a config could run code; and a resolver's name can
    itself be interpolated. So this is an allowlist.
    """
    for path, text in strings_in(value, above):
        if len(_ESCAPED.findall(text)) == text.count("${"):
            continue
        prefix = f"{origins.prefix(path)}{dotted(path)}"
        # From the inside out: an allowed interpolation is replaced by a mark that is valid in a default only.
        rest = text
        for _ in range(DEEPEST):
            for match in _ALLOWED.finditer(rest):
                variable = match["variable"]
                if variable and not match["default"] and variable not in os.environ:
                    raise UserMistake(f"{prefix} needs the environment variable {variable}, which is not set.")
            rest = _ALLOWED.sub("\0", rest)
        if "${" in rest:
            raise UserMistake(
                f"{prefix} is {shown(text)}, but only ${{another.key}} and ${{oc.env:NAME}} are allowed in a config."
            )


def resolve(given: dict[str, Any], origins: Origins) -> dict[str, Any]:
    """The tree with references resolved; a reference to a key that is not set gives its default."""
    texts = list(strings_in(given))
    for path, text in texts:
        if text == "???":  # OmegaConf's mark for a mandatory value
            raise UserMistake(f"{origins.prefix(path)}{dotted(path)} is mandatory (???): give it a value.")
    if not any("${" in text for _, text in texts):
        return given

    # Imported lazily: it takes a tenth of a second, and most configs do not need it.
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

    try:
        _refuse_bombs(given, [path for path, text in texts if "${" in text], origins)
        defaults = OmegaConf.create(Config.model_construct().model_dump(mode="json"))
        resolved = OmegaConf.to_container(OmegaConf.merge(defaults, given), resolve=True)
    except OmegaConfBaseException as error:
        path = tuple(str(error.full_key or "").split("."))
        prefix = f"{origins.prefix(path)}{dotted(path)}"
        reason = str(error).splitlines()[0]
        if isinstance(error, InterpolationKeyError) and (key := re.search("key '(.*)' not found", reason)):
            raise UserMistake(f"{prefix} refers to {key[1]}, which is not a key of this config.") from error
        raise UserMistake(f"{prefix} cannot be resolved: {reason}.") from error
    except RecursionError as error:
        raise UserMistake(f"{origins.prefix(())}a value refers to itself through ${{…}}.") from error
    restricted: dict[str, Any] = _restrict(resolved, given)
    return restricted


def _refuse_bombs(tree: dict[str, Any], paths: list[KeyPath], origins: Origins) -> None:
    """Refuse references that expand exponentially: a text that refers twice to one that refers twice to another, …"""
    sizes: dict[KeyPath, int] = {}

    def size(path: KeyPath) -> int:
        if path not in sizes:
            sizes[path] = 0  # OmegaConf refuses cycles
            sizes[path] = sum(_sizes(path))
        return sizes[path]

    def _sizes(path: KeyPath) -> Iterator[int]:
        value = _at(tree, path)
        if isinstance(value, Mapping):
            yield from (size((*path, key)) for key in value)
        elif isinstance(value, list):
            yield from (size((*path, index)) for index in range(len(value)))
        elif isinstance(value, str):
            yield len(value)
            for match in _REFERENCE.finditer(value):
                around = path[: max(0, len(path) - len(match["up"]))] if match["up"] else ()
                yield size((*around, *_KEY_PART.findall(match["key"])))
        else:
            yield 1

    if sum(map(size, paths)) > MOST_CHARACTERS:
        raise UserMistake(f"{origins.prefix(())}references (${{…}}) make more than {MOST_CHARACTERS:,} characters.")


def _at(tree: Any, path: KeyPath) -> Any:
    """The value at a path, or None."""
    for part in path:
        try:
            tree = tree[int(part) if isinstance(tree, list) else part]
        except (LookupError, ValueError, TypeError):
            return None
    return tree


def escape(value: Any) -> Any:
    """Escape `${` so that OmegaConf reads the texts back unchanged."""
    if isinstance(value, str):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    if isinstance(value, dict):
        return {key: escape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [escape(inner) for inner in value]
    return value


def _restrict(resolved: Any, given: Any) -> Any:
    """Only the keys that were given: a default must not look like a value set by the user."""
    if isinstance(resolved, dict) and isinstance(given, dict):
        return {key: _restrict(resolved[key], inner) for key, inner in given.items()}
    return resolved
