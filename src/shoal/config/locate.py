"""Read and write YAML, keeping track of the file and line (or override) of each key."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from shoal.mistakes import UserMistake

try:  # libyaml's, if PyYAML was built with it: a quarter of the time, which every run spends at its start
    from yaml import CSafeDumper as _FasterDumper
except ImportError:
    from yaml import SafeDumper as _FasterDumper  # type: ignore[assignment]

KeyPath = tuple[str | int, ...]

MOST_VALUES = 100_000  # in one file
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class FileLine:
    """A line of a YAML file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True)
class Override:
    """A `key=value` from the command line."""

    text: str
    path: KeyPath

    def __str__(self) -> str:
        return f"override {self.text}"


Origin = FileLine | Override


@dataclass
class Origins:
    """Where each key was last set. `whole` names the config itself, for errors about no key in particular."""

    whole: str = ""
    places: dict[KeyPath, Origin] = field(default_factory=dict)

    def forget_below(self, replaced: set[KeyPath]) -> None:
        """Drop the origins of keys inside replaced values."""
        for old in [old for old in self.places if any(old[:length] in replaced for length in range(len(old)))]:
            del self.places[old]

    def lay(self, document: "Document", file: str) -> None:
        """Record the keys of a file over those recorded so far."""
        self.forget_below(document.lines.keys() - document.mappings)
        self.places.update({path: FileLine(file, line) for path, line in document.lines.items()})

    def lay_override(self, document: "Document", override: Override) -> None:
        """Record the key of an override, and the keys inside its value, over those recorded so far."""
        for length in range(1, len(override.path)):
            # A block that is not set elsewhere is created by this override.
            self.places.setdefault(override.path[:length], override)
        replaced = {(*override.path, *path) for path in document.lines.keys() - document.mappings}
        self.forget_below(replaced if isinstance(document.value, dict) else {override.path})
        self.places[override.path] = override
        self.places.update({(*override.path, *path): override for path in document.lines})

    def find(self, path: KeyPath) -> Origin | None:
        """The origin of a key, or of the nearest enclosing key."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.places:
                return self.places[path[:length]]
        return None

    def prefix(self, path: KeyPath) -> str:
        """How a sentence about `path` begins: 'run.yaml:7: ', 'override a=b: ', or nothing."""
        origin = self.find(path) or self.whole
        return f"{origin}: " if origin else ""


@dataclass(frozen=True)
class Document:
    """The value of a YAML text, the line of each key, and which keys hold mappings."""

    value: Any
    lines: dict[KeyPath, int]
    mappings: set[KeyPath]


_NUMBERS = (
    ("tag:yaml.org,2002:int", r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)"),
    ("tag:yaml.org,2002:float", r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?"),
    ("tag:yaml.org,2002:float", r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+"),
    ("tag:yaml.org,2002:float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"),
)


def _implicit_resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """Which unquoted scalars are not strings, by first letter: PyYAML's, with changes that configs need.

    `1e-4` is a number; `12:30:00` is text (YAML 1.1 reads it in base 60), and so are `007` and dates.
    """
    dropped = (":int", ":float", ":timestamp")
    resolvers = {
        first: [(tag, pattern) for tag, pattern in known if not tag.endswith(dropped)]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    for tag, pattern in _NUMBERS:
        for first in "-+.0123456789":
            resolvers.setdefault(first, []).append((tag, re.compile(rf"^(?:{pattern})$")))
    return resolvers


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _implicit_resolvers()

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        number: int = self.construct_yaml_int(node)
        str(number)  # raises ValueError for a hexadecimal number with more decimal digits than Python converts
        return number


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_integer)


class _Dumper(yaml.SafeDumper):
    """The inverse of the loader: quotes exactly the strings that it would read as another type."""

    yaml_implicit_resolvers = _implicit_resolvers()

    def represent_plain_list(self, items: list[Any]) -> yaml.Node:
        in_brackets = not any(isinstance(item, dict | list) for item in items)
        return self.represent_sequence("tag:yaml.org,2002:seq", items, flow_style=in_brackets)


_Dumper.add_representer(list, _Dumper.represent_plain_list)


class _FastDumper(_FasterDumper):
    """The same with libyaml's emitter."""

    yaml_implicit_resolvers = _Dumper.yaml_implicit_resolvers
    yaml_representers = _Dumper.yaml_representers


def read_document(file: Path) -> Document:
    """Read a YAML file; errors raise UserMistake with the line."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserMistake(f"{file} is not a text file in UTF-8; save it as UTF-8, or name another file.") from error
    except IsADirectoryError as error:
        inside = sorted(each.name for each in file.glob("*.y*ml"))
        names = f": {' or '.join(inside[:3])}" if inside else ""
        raise UserMistake(f"{file} is a folder; name the YAML file of a run{names}.") from error
    except OSError as error:
        raise UserMistake(f"{file} cannot be read: {error.strerror or error}.") from error
    return parse_document(text, str(file))


def parse_document(text: str, source: str, with_lines: bool = True) -> Document:
    """Parse YAML text; errors name `source`, and the line if `with_lines`."""

    def locate(line: int) -> str:
        return f"{source}:{line + 1}" if with_lines else source

    try:
        # PyYAML's reader refuses control characters in the constructor, before parsing.
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return Document(None, {}, set())
        _refuse_odd_keys(node, locate, (), count())
        document = Document(_construct(loader, node), {}, set())
        # After construction, because that is when PyYAML puts merged keys (<<) into their mapping.
        for path, line, is_mapping in _positions(node, ()):
            document.lines[path] = line + 1
            if is_mapping:
                document.mappings.add(path)
        return document
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        saw = ", ".join(part for part in (error.context, error.problem) if part)
        hint = " Indent with spaces, not tabs." if "'\\t'" in saw else ""
        raise UserMistake(f"{locate(mark.line) if mark else source}: this is not YAML: {saw}.{hint}") from error
    except yaml.YAMLError as error:
        raise UserMistake(f"{source}: this is not YAML: {str(error).splitlines()[0]}.") from error
    except (RecursionError, ValueError) as error:
        raise UserMistake(f"{source}: this YAML cannot be converted to values: {error}.") from error


def _construct(loader: _Loader, node: yaml.Node) -> Any:
    try:
        return loader.construct_document(node)
    except (KeyError, IndexError, AttributeError) as error:
        # PyYAML raises these for a tag that does not match its value, such as `!!bool maybe`.
        raise ValueError("a value is not what its tag (!!) says") from error


def write_yaml(value: Any) -> str:
    """YAML that `parse_document` reads back as the same value: one key per line, lists of plain values in brackets."""
    try:
        text = _dump(value, _FastDumper)
    except UnicodeEncodeError:  # a lone surrogate, as in the name of a file that is not UTF-8
        return _dump(value, _Dumper)
    # libyaml escapes what is beyond 16 bits, such as emoji, though they are to stay readable.
    return _dump(value, _Dumper) if "\\U" in text else text


def _dump(value: Any, dumper: type[_Dumper | _FastDumper]) -> str:
    return str(yaml.dump(value, Dumper=dumper, sort_keys=False, allow_unicode=True, width=120))


def _refuse_odd_keys(
    node: yaml.Node, locate: Callable[[int], str], above: tuple[yaml.Node, ...], visits: Iterator[int]
) -> None:
    """Refuse duplicate keys, keys that are not text, text that cannot be encoded, values that contain themselves, and
    nested aliases that expand to millions of values: PyYAML accepts them all."""
    if node in above:
        raise UserMistake(f"{locate(node.start_mark.line)}: a value contains itself through an alias.")
    if next(visits) > MOST_VALUES:
        raise UserMistake(
            f"{locate(node.start_mark.line)}: with its aliases this has more than {MOST_VALUES:,} values."
        )
    if isinstance(node, yaml.ScalarNode):
        _refuse_surrogates(node, locate)
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            _refuse_odd_keys(item, locate, (*above, node), visits)
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            here = locate(key.start_mark.line)
            if not isinstance(key, yaml.ScalarNode) or not key.tag.endswith((":str", ":merge")):
                shown = f"the key {key.value}" if isinstance(key, yaml.ScalarNode) else "a key"
                raise UserMistake(f"{here}: {shown} is not text; put it in quotes if it is intended.")
            if key.value in seen:
                line = seen[key.value]
                first = f", first in line {line + 1}" if line != key.start_mark.line else ""
                raise UserMistake(f"{here}: the key {key.value} is set twice in this block{first}; keep one of them.")
            seen[key.value] = key.start_mark.line
            _refuse_surrogates(key, locate)
            _refuse_odd_keys(value, locate, (*above, node), visits)


def _refuse_surrogates(node: yaml.ScalarNode, locate: Callable[[int], str]) -> None:
    if _SURROGATE.search(node.value):
        raise UserMistake(f"{locate(node.start_mark.line)}: a lone surrogate (\\ud800 to \\udfff) is not a character.")


def _positions(node: yaml.Node, path: KeyPath) -> Iterator[tuple[KeyPath, int, bool]]:
    """Each key and list item below `node`: its path, its line, and whether it holds a mapping."""
    below: list[tuple[str | int, int, yaml.Node]] = []
    if isinstance(node, yaml.MappingNode):
        below = [(key.value, key.start_mark.line, value) for key, value in node.value]
    elif isinstance(node, yaml.SequenceNode):
        below = [(index, item.start_mark.line, item) for index, item in enumerate(node.value)]
    for name, line, child in below:
        yield (*path, name), line, isinstance(child, yaml.MappingNode)
        yield from _positions(child, (*path, name))
