"""Writes docs/config.md: every key with its type, default and help, from the schema itself."""

import json
from typing import Any

from shoal.config.load import json_schema
from shoal.config.shorthand import SHORTHANDS
from shoal.config.unbuilt import LIMITS

UNBUILT = {limit.key: limit.meanwhile for limit in LIMITS}
SHORT = {".".join(map(str, (*block, key))): ".".join(map(str, block)) for block, key in SHORTHANDS.items()}

INTRODUCTION = """# The config: every key

One YAML file describes a run. `shoal train run.yaml train.lr=3e-4 data.path=null` changes keys from the command line;
`include: [base.yaml]` lays a file over others; `${data.max_length}` and `${oc.env:HOME}` refer to other keys and to the
environment. Text may stand in the place of some blocks: `train.optimizer: lion` is `train.optimizer: {name: lion}`, and
`data: FILE` is its path, with the source that the suffix tells. `shoal config show run.yaml` prints the resolved file,
`shoal config schema` JSON Schema for an editor.
A key marked *not built yet* is refused with a sentence that says what to use meanwhile.

This page is made by `make docs`; its source is `src/shoal/config/`.
"""


def document() -> str:
    """The page as Markdown."""
    schema = json_schema()
    defs = schema["$defs"]
    blocks = {name: block for name, key in schema["properties"].items() if (block := _block(key, defs)) is not None}
    top = {name: key for name, key in schema["properties"].items() if name not in blocks}
    lines = [INTRODUCTION, "## The top level", "", *_table("", top, defs)]
    for name, block in blocks.items():
        lines += ["", f"## `{name}`", "", block["description"], "", *_table(f"{name}.", block["properties"], defs)]
    return "\n".join(lines) + "\n"


def _table(prefix: str, keys: dict[str, Any], defs: dict[str, Any]) -> list[str]:
    return ["| key | default | what it is |", "| --- | --- | --- |", *_rows(prefix, keys, defs)]


def _rows(prefix: str, keys: dict[str, Any], defs: dict[str, Any]) -> list[str]:
    """A row for each key, and below it rows for the keys of the block that it is, or may be."""
    rows = []
    for name, key in keys.items():
        if _block(key, defs) is None:
            rows.append(_row(prefix + name, key))
        options = [key, *key.get("anyOf", [])]
        options += [option["items"] for option in options if "items" in option]
        inside = next((block for option in options if (block := _block(option, defs))), None)
        if inside is not None:
            rows += _rows(f"{prefix}{name}.", inside["properties"], defs)
    return rows


def _block(key: dict[str, Any], defs: dict[str, Any]) -> dict[str, Any] | None:
    """The block of keys that `key` refers to, if it does; also where text may stand in its place."""
    options = key.get("anyOf", [])
    if len(options) == 2 and options[0].get("type") == "string" and "default" not in key:
        key = options[1]
    found: dict[str, Any] | None = defs.get(key.get("$ref", "").removeprefix("#/$defs/"))
    return found if found is not None and "properties" in found else None


def _row(name: str, key: dict[str, Any]) -> str:
    default = f"`{json.dumps(key['default'])}`" if "default" in key else ""
    sentences = [key["description"]]
    choices = _choices(key)
    if len(choices) > 1:
        sentences.append(f"One of {', '.join(choices)}.")
    if name in SHORT:
        sentences.append(f"Short: `{SHORT[name]}: {name.rpartition('.')[2].upper()}`.")
    if name in UNBUILT:
        sentences.append(f"*Not all of this is built yet. {UNBUILT[name]}*")
    elif name.startswith("slurm."):
        sentences.append("*Not built yet.*")
    return f"| `{name}` | {default} | {' '.join(sentences)} |"


def _choices(key: dict[str, Any]) -> list[str]:
    values = [*key.get("enum", []), *([key["const"]] if "const" in key else [])]
    found = [f"`{value}`" for value in values]
    for option in key.get("anyOf", []):
        found += ["`true`", "`false`"] if option.get("type") == "boolean" else _choices(option)
    return found


if __name__ == "__main__":
    print(document(), end="")
