"""Load a Config from a YAML file and overrides, and write it back."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from shoal.config.combinations import refuse_combinations
from shoal.config.explain import closest, validate
from shoal.config.interpolate import escape, refuse_unsafe, resolve
from shoal.config.locate import Document, KeyPath, Origins, Override, parse_document, read_document, write_yaml
from shoal.config.replaced import is_run
from shoal.config.schema import Config
from shoal.config.shorthand import SHORTHANDS, expand, show_shorthands
from shoal.config.unbuilt import refuse_unbuilt
from shoal.config.words import dotted, shown
from shoal.mistakes import UserMistake
from shoal.paths import user_path

# Dotted, or in brackets if a key contains dots: train.lr_groups[lm_head.*]
_KEY_PART = re.compile(r"\.?([^.\[\]=\s]+)|\[([^\[\]]+)\]")

MOST_FILES = 100


def load_config(
    path: Path | str | None, overrides: Sequence[str] = (), *, planned: bool = False, needs_model: bool = True
) -> Config:
    """Read a YAML file and its includes, apply `key=value` overrides, and validate the result.

    Errors raise UserMistake with one line for each mistake, which names the file and line or the override. With
    `planned` the config may use what is not built yet but can be forecast. Without `needs_model` it may leave the model
    out, to look at its data.
    """
    if isinstance(path, Mapping):
        raise UserMistake("load_config reads a YAML file, not a mapping: use config_from_mapping.")
    origins = Origins(whole=str(path) if path is not None else "")
    tree: dict[str, Any] = {}
    if path is not None:
        for file, written in _layers(user_path(path, "The file"), (), count(1)):
            document = expand(written)
            origins.lay(document, str(file))
            refuse_unsafe(document.value, origins)
            tree = _merge(tree, document.value)
    tree = _override(tree, overrides, origins)
    if needs_model and path is not None:
        _refuse_custom_loop(user_path(path, "The file"), tree)
    return _finish(tree, origins, planned=planned, needs_model=needs_model)


def _refuse_custom_loop(path: Path, tree: dict[str, Any]) -> None:
    """A UserMistake if `path` is the config of a run whose model a script made."""
    model = tree.get("model") or {}
    has_model = not isinstance(model, dict) or any(model.get(key) is not None for key in ("from", "shape"))
    if not has_model and path.name == "config.yaml" and is_run(path.parent):
        raise UserMistake(
            f"{path.parent} is a run of a training loop of your own, whose model is in the script: run that again to "
            f"train; shoal export {path.parent} writes its weights."
        )


def _override(tree: dict[str, Any], overrides: Sequence[str], origins: Origins) -> dict[str, Any]:
    """`tree` with the `key=value` overrides."""
    for text in [overrides] if isinstance(overrides, str) else overrides:
        override, document = _read_override(text)
        if override.path in SHORTHANDS and isinstance(document.value, str):
            override = Override(text, (*override.path, SHORTHANDS[override.path]))
        document = expand(document, override.path)
        _refuse_below_a_value(tree, override)
        origins.lay_override(document, override)
        refuse_unsafe(document.value, origins, override.path)
        tree = _merge(tree, _nested(override.path, document.value))
    return tree


def overrides_of(values: Mapping[str, Any], above: str = "") -> Iterator[str]:
    """The overrides that nested `values` stand for: {"train": {"steps": 9}} is train.steps=9."""
    for key, value in _plain(values).items():
        dotted_key = f"{above}[{key}]" if "." in key else f"{above}.{key}" if above else key
        if isinstance(value, dict) and value:
            yield from overrides_of(value, dotted_key)
        else:
            yield f"{dotted_key}={json.dumps(value)}"


def config_from_mapping(
    mapping: Mapping[str, Any], overrides: Sequence[str] = (), *, planned: bool = False, needs_model: bool = True
) -> Config:
    """The config that a mapping describes: the content of a YAML file, without `include`. The options are those of
    `load_config`."""
    if not isinstance(mapping, Mapping):
        raise UserMistake(
            f"config_from_mapping reads a mapping, not a {type(mapping).__name__}: load_config reads files."
        )
    if mapping.get("include"):
        raise UserMistake("include works in a file only: read that file with load_config.")
    origins = Origins()
    tree = expand(Document(_plain(mapping), {}, set())).value
    refuse_unsafe(tree, origins)
    tree = _override(tree, overrides, origins)
    return _finish(tree, origins, planned=planned, needs_model=needs_model)


def config_to_yaml(config: Config) -> str:
    """The complete config as YAML, with defaults; loading it gives an equal Config."""
    return write_yaml(escape(config_values(config)))


def config_values(config: Config) -> dict[str, Any]:
    """The complete config as plain values, with defaults; the inverse of `config_from_mapping`."""
    values = config.model_dump(mode="json")
    del values["include"]
    return values


def json_schema() -> dict[str, Any]:
    """The config as JSON Schema, for editors and other programs."""
    return show_shorthands(Config.model_json_schema())


def _finish(tree: dict[str, Any], origins: Origins, *, planned: bool = False, needs_model: bool = True) -> Config:
    config = validate(resolve(tree, origins), origins, needs_model=needs_model, planned=planned)
    if not planned:
        refuse_unbuilt(config, origins)
    refuse_combinations(config, origins, planned=planned)
    return config


def _nested(path: KeyPath, value: Any) -> dict[str, Any]:
    """`value` inside the blocks that `path` leads through."""
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge as OmegaConf does, without its import time: blocks key by key; all else, lists too, is replaced."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both else value
    return merged


def _layers(file: Path, including: tuple[Path, ...], number: Iterator[int]) -> Iterator[tuple[Path, Document]]:
    """The files that `file` includes, lowest precedence first, and then the file itself."""
    if next(number) > MOST_FILES:
        raise UserMistake(f"{including[0]}: this includes more than {MOST_FILES} files, directly and indirectly.")
    if not file.exists():
        raise UserMistake(_not_there(file))
    document = read_document(file)
    content = {} if document.value is None else document.value
    if not isinstance(content, dict):
        raise UserMistake(f"{file} must hold keys with values, but holds {shown(content)}.")
    lines = document.lines
    included = content.pop("include", [])
    if not isinstance(included, list) or not all(isinstance(name, str) for name in included):
        raise UserMistake(f"{file}:{lines['include',]}: include is {shown(included)}, but must be a list of files.")
    for index, name in enumerate(included):
        here = f"{file}:{lines['include', index]}"
        below = file.parent / name
        trail = (*including, file)
        try:
            there, real = below.is_file(), below.resolve()
        except (OSError, ValueError) as error:  # too long for a name, or with invalid characters
            raise UserMistake(f"{here}: include names {shown(name)}, which cannot be a file.") from error
        if real in {above.resolve() for above in trail}:
            circle = " → ".join(str(above) for above in (*trail, below))
            raise UserMistake(f"{here}: include is circular: {circle}.")
        if not there:
            raise UserMistake(f"{here}: included file {_not_there(below)}")
        yield from _layers(below, trail, number)
    yield file, Document(content, lines, document.mappings)


def _not_there(file: Path) -> str:
    if "=" in file.name and not file.suffix.startswith((".yaml", ".yml")):
        return f"{file} is an override, but a config file comes first: … run.yaml {file}"
    nearby = [each.name for each in file.parent.glob("*.y*ml")] if file.parent.is_dir() else []
    return f"{file} does not exist.{closest(file.name, nearby)}"


def _read_override(text: str) -> tuple[Override, Document]:
    key, equals, raw = text.partition("=")
    if not equals:
        raise UserMistake(f"override {text} has no value: write {text}=VALUE.")
    parts = list(_KEY_PART.finditer(key.strip()))
    if not parts or "".join(part[0] for part in parts) != key.strip() or key.strip().startswith("."):
        raise UserMistake(f"override {text}: the key must be written like train.lr.")
    path: KeyPath = tuple(part[1] or part[2] for part in parts)
    if path[0] == "include":
        raise UserMistake(f"override {text}: include works in a file only.")
    if not raw.strip():  # an unset variable of the shell, more often than null
        raise UserMistake(f"override {text} has no value: write {text}VALUE, or {text}null for none.")
    document = parse_document(raw, f"override {text}", with_lines=False)
    return Override(text, path), document


def _refuse_below_a_value(tree: Mapping[str, Any], override: Override) -> None:
    """Refuse an override of a key inside a plain value, which would silently discard that value."""
    below: Any = tree
    for depth, key in enumerate(override.path):
        if below is None:
            return
        if not isinstance(below, dict):
            around = dotted(override.path[:depth])
            raise UserMistake(
                f"{override}: {around} is {shown(below)}, which has no keys inside; set {around} as a whole."
            )
        below = below.get(key)


def _plain(value: Any) -> Any:
    """Values as YAML would give them: paths from Python callers become text, and keys must be text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise UserMistake(f"the key {key!r} is not text.")
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
