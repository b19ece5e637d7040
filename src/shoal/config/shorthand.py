"""Text in the place of a block: `train.optimizer: lion` is short for `train.optimizer: {name: lion}`."""

from collections.abc import Mapping
from typing import Any

from shoal.config.locate import Document, KeyPath

# Each block that may be given as text, and the key that the text is.
SHORTHANDS: dict[KeyPath, str] = {
    ("model",): "from",
    ("adapter",): "kind",
    ("data",): "path",
    ("train", "schedule"): "name",
    ("train", "optimizer"): "name",
}


def expand(document: Document, above: KeyPath = ()) -> Document:
    """The document, all of which stands under the key `above`, with blocks where it has text for them."""
    value, lines, mappings = document.value, dict(document.lines), set(document.mappings)
    for block, key in SHORTHANDS.items():
        below = block[len(above) :]
        if block[: len(above)] == above and isinstance(text := _at(value, below), str):
            value = _put(value, below, {key: text})
            # From here on it is a block, which is merged into the block of a file below.
            mappings.add(below)
            lines[*below, key] = lines.get(below, 1)
    return Document(value, lines, mappings)


def expand_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """The same for values without a file."""
    expanded: dict[str, Any] = expand(Document(tree, {}, set())).value
    return expanded


def show_shorthands(schema: dict[str, Any]) -> dict[str, Any]:
    """Our JSON Schema with both forms of each block that may be text."""
    for block, key in SHORTHANDS.items():
        properties: dict[str, Any] = schema["properties"]
        for part in block[:-1]:
            properties = _block_of(schema, properties[str(part)])["properties"]
        reference = properties[str(block[-1])]
        inside = _block_of(schema, reference)
        words = {one: values for one, values in inside["properties"][key].items() if one == "enum"}
        properties[str(block[-1])] = {
            "anyOf": [{"type": "string", **words}, {"$ref": reference["$ref"]}],
            "description": reference.get("description", inside["description"]),
        }
    return schema


def _block_of(schema: dict[str, Any], key: dict[str, Any]) -> dict[str, Any]:
    options = [key, *key.get("anyOf", [])]
    name = next(option["$ref"] for option in options if "$ref" in option).removeprefix("#/$defs/")
    found: dict[str, Any] = schema["$defs"][name]
    return found


def _at(value: Any, path: KeyPath) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _put(value: Any, path: KeyPath, block: dict[str, Any]) -> Any:
    return {**value, path[0]: _put(value[path[0]], path[1:], block)} if path else block
