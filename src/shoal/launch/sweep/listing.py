"""Members from a file: a YAML list, or JSON lines, with the overrides of one member in each entry."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.config.locate import parse_document
from shoal.launch.sweep.space import Overrides, check_count
from shoal.mistakes import UserMistake, shortened
from shoal.paths import user_path

_PLAIN_KEY = re.compile(r"[^.\[\]=\s]+")


def read_members(given: Path) -> list[Overrides]:
    """The overrides of each member. An entry is a block of keys, nested or dotted, or a list of `key=value`."""
    path = user_path(given, "--list")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise UserMistake(f"--list {path} cannot be read: {reason}.") from None
    entries = _json_lines(path, text) if path.suffix in (".jsonl", ".ndjson") else parse_document(text, str(path)).value
    if not isinstance(entries, list) or not entries:
        raise UserMistake(f"--list {path} must hold a list with the overrides of one member in each entry.")
    check_count(len(entries), f"--list {path}")
    found: list[Overrides] = []
    for number, entry in enumerate(entries, 1):
        here = f"--list {path}, entry {number}"
        overrides = tuple(_overrides(entry, here))
        if overrides in found:
            raise UserMistake(f"{here} repeats entry {found.index(overrides) + 1}.")
        found.append(overrides)
    return found


def _json_lines(path: Path, text: str) -> list[Any]:
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(json.loads(line))
            except ValueError as error:
                raise UserMistake(f"{path}:{number}: this is not JSON: {error}.") from None
    return found


def _overrides(entry: Any, here: str) -> Iterator[str]:
    if isinstance(entry, Mapping):
        yield from _flattened(entry)
        return
    texts = [entry] if isinstance(entry, str) else entry
    if not isinstance(texts, list) or not all(isinstance(text, str) and "=" in text for text in texts):
        raise UserMistake(
            f"{here} is {shortened(json.dumps(entry, default=str))}, but must be keys with values, such as "
            "{train.lr: 1e-4}, or a list such as [train.lr=1e-4]."
        )
    yield from texts


def _flattened(block: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in block.items():
        # At the top a key may be dotted; below, one with dots is a name, such as a pattern of train.lr_groups.
        below = f".{key}" if _PLAIN_KEY.fullmatch(str(key)) else f"[{key}]"
        path = f"{above}{below}" if above else str(key)
        if isinstance(value, Mapping) and value:
            yield from _flattened(value, path)
        else:
            yield f"{path}={value if _is_word(value) else json.dumps(value)}"


def _is_word(value: Any) -> bool:
    """Whether YAML reads the text as this text."""
    return isinstance(value, str) and re.fullmatch(r"[A-Za-z_][\w./+-]*", value) is not None and value.lower() not in (
        "true", "false", "yes", "no", "on", "off", "null", "y", "n",
    )  # fmt: skip
