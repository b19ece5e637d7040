"""Damaged and hostile configs. Each is a function of a good config's text and a random generator."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tests.faults.damage import flip_bytes, locations, repeat_a_part, spoil_utf8, truncate

# (text of a good config, folder for files to include, random generator) → the config's bytes.
Make = Callable[[str, Path, Random], bytes]

TAGS = (
    "!!python/object/apply:os.system ['touch MARKER']",
    "!!python/object/new:os.system ['touch MARKER']",
    "!!python/object/apply:subprocess.check_call [[touch, MARKER]]",
    "!!python/object/apply:builtins.eval [\"open('MARKER', 'w')\"]",
    "!!python/name:os.system",
    "!!python/module:os",
    "!!python/tuple [1, 2]",
    "!!python/object:object {}",
    "!include /etc/passwd",
    "!!bool maybe",
    "!!timestamp never",
    "!!timestamp 2001-99-99",
    "!!int ''",
    "!!int x",
    "!!float ''",
    "!!float x",
    "!!null x",
    "!!binary '/'",
    "!!binary é",
    "!!set {a, b}",
    "!!omap [a: 1]",
    "!!pairs [a: 1]",
    "!!str [a]",
    "!!map a",
    "!!seq {a: 1}",
    "!!merge x",
    "!!value x",
    "=",
    "<<",
)
REFERENCES = (
    "${oc.env:HOME}",
    "${oc.env:SHOAL_TEST_SECRET}",
    "${oc.env:SHOAL_TEST_NOT_SET}",
    "${oc.env:SHOAL_TEST_NOT_SET,x}",
    "${oc.env:SHOAL_TEST_NOT_SET,null}",
    "${oc.env:}",
    "${oc.env}",
    "${oc.coerce:os.system,1}",
    "${oc.decode:'1'}",
    "${oc.create:{}}",
    "${oc.select:train}",
    "${name}",
    "${train}",
    "${model}",
    "${..train}",
    "${.lr}",
    "${.}",
    "${}",
    "${",
    "$}{",
    "${${name}}",
    "${nowhere.at.all}",
    "${train.lr}${train.lr}",
    "${train[0]}",
    "${data.path[99999999999999999999]}",
    "${-}",
    "${[}",
    "${]}",
    "${a[}",
    "${name}" * 300,
    "\\${name}",
    "???",
)
SCALARS = (
    "null",
    "true",
    "-1",
    "0",
    "1e400",
    ".nan",
    "-.inf",
    "9" * 5000,
    "0x" + "f" * 5000,
    "1_",
    "0x_",
    "12:30:45",
    "2001-01-01",
    "''",
    '"\\0"',
    '"\\ud800"',
    '"\\U0010FFFF"',
    '"\\U00110000"',
    "x" * 100_000,
    "[]",
    "{}",
    "[[[]]]",
    "{a: {b: {c: 1}}}",
    "[1, a, null, {}]",
    "[{}]",
    "[{weight: []}]",
    "{every: []}",
    "*unknown",
    "&a [*a]",
    "|\n  text",
    ">\n\ttext",
)
FILES = (
    "missing.yaml",
    "run.yaml",
    "../run.yaml",
    ".",
    "..",
    "",
    "/",
    "~",
    "\\0",
    "\\ud800",
    "x" * 300,
    "x/" * 3000,
    "/etc/passwd",
    "/dev/null",
    "/dev/zero",
    "/proc/self/environ",
    "/proc/self/mem",
    "${oc.env:HOME}",
)


def _damaged(damage: Callable[[bytes, Random], bytes]) -> Make:
    return lambda text, folder, chance: damage(text.encode(), chance)


def _with_line(text: str, line: str) -> bytes:
    return f"{text}\n{line}\n".encode()


def odd_value(text: str, folder: Path, chance: Random) -> bytes:
    """One value of the config, at any depth, is a text that YAML reads as something odd."""
    tree = yaml.safe_load(text)
    holder, key = chance.choice(list(locations(tree)))
    holder[key] = "ODD"
    dumped = yaml.safe_dump(tree, allow_unicode=True)
    return dumped.replace("ODD", chance.choice((*SCALARS, *TAGS)), 1).encode(errors="surrogatepass")


def odd_reference(text: str, folder: Path, chance: Random) -> bytes:
    tree = yaml.safe_load(text)
    for _ in range(chance.choice((1, 1, 3))):
        holder, key = chance.choice(list(locations(tree)))
        holder[key] = chance.choice(("", "", "x")) + chance.choice(REFERENCES)
    return yaml.safe_dump(tree).encode()


def moved_value(text: str, folder: Path, chance: Random) -> bytes:
    """A part of the config is in the position of another."""
    tree = yaml.safe_load(text)
    found = list(locations(tree))
    (holder, key), (other, other_key) = chance.choice(found), chance.choice(found)
    holder[key] = yaml.safe_load(yaml.safe_dump(other[other_key]))
    return yaml.safe_dump(tree).encode()


def odd_key(text: str, folder: Path, chance: Random) -> bytes:
    tree: Any = yaml.safe_load(text)
    holders = [tree, *(holder[key] for holder, key in locations(tree) if isinstance(holder[key], dict))]
    key = chance.choice(("", " ", "x" * 200_000, "é", "\0", "a.b.c", "a[0]", "${name}", "<<", "=", 1, 1.5, None, True))
    chance.choice(holders)[key] = chance.choice((1, "x", None, {}, {"a": 1}, [1]))
    return yaml.safe_dump(tree).encode()


def odd_syntax(text: str, folder: Path, chance: Random) -> bytes:
    lines = text.splitlines()
    odd = ("\ttrain: 1", "train:\n\t lr: 1", "---", "...", "--- {}\n--- {}", "%YAML 9.9", "? [a, b]\n: 1", "? {a: b}",
           "- 1", "`", "a: b: c", "*x", "&x", "!", "!!", "'", '"', "{", "[", "|", "\x07", "\x85", "\ufeff", "<<: 1",
           "<<: [1]", "<<: *x", "&a <<: *a", "x: &a {<<: *a}", "x: &a {y: *a}", "x: &a [*a]")  # fmt: skip
    lines.insert(chance.randrange(len(lines) + 1), chance.choice(odd))
    return "\n".join(lines).encode()


def deep(text: str, folder: Path, chance: Random) -> bytes:
    depth = chance.choice((50, 150, 300, 500, 3_000))
    opened, closed = chance.choice((("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", "")))
    key = chance.choice(("x", "name", "data", "include", "train"))
    return _with_line(text, f"{key}:\n  {opened * depth}1{closed * depth}")


def bomb(text: str, folder: Path, chance: Random) -> bytes:
    """Aliases, merges or references that expand to a billion values."""
    width, depth = chance.choice(((10, 9), (2, 40), (3, 25)))
    kind = chance.choice(("lists", "blocks", "merges", "texts", "nodes", "defaults"))
    names = [f"x{index}" for index in range(depth)]
    if kind == "defaults":
        return _with_line(text, f"name: '{'${oc.env:NOT_SET,' * 5_000}x{'}' * 5_000}'")
    lines = []
    for above, name in zip([None, *names], names, strict=False):
        if kind in ("texts", "nodes"):
            one = "lol" if above is None else f"${{{above}}}"
            value = one * width if kind == "texts" else [one] * width
            lines.append(f"{name}: {value}")
            continue
        one = "lol" if above is None else f"*{above}"
        if kind == "lists":
            lines.append(f"{name}: &{name} [{', '.join([one] * width)}]")
        elif kind == "blocks" or above is None:
            lines.append(f"{name}: &{name} {{{', '.join(f'k{index}: {one}' for index in range(width))}}}")
        else:
            lines.append(f"{name}: &{name} {{<<: [{', '.join([one] * width)}]}}")
    return _with_line(text, "\n".join(lines))


def odd_include(text: str, folder: Path, chance: Random) -> bytes:
    names = [chance.choice(FILES) for _ in range(chance.choice((1, 1, 2)))]
    listed = chance.choice(
        ("[{}]", "[{}]", "[{}]", "{}", "[[{}]]", "{{{}: 1}}", "[{}, 1]", "[{}, null]", "!!set {{{}}}")
    )
    return _with_line(text, f"include: {listed.format(', '.join(chr(34) + name + chr(34) for name in names))}")


def many_includes(text: str, folder: Path, chance: Random) -> bytes:
    """A circle, a very long chain, or a chain whose files are each included twice."""
    kind = chance.choice(("circle", "chain", "doubling"))
    length = {"circle": 5, "chain": 1_200, "doubling": 40}[kind]
    for index in range(length):
        below = f"part-{index + 1}.yaml" if index + 1 < length else "part-0.yaml" if kind == "circle" else ""
        listed = ", ".join([below] * (2 if kind == "doubling" else 1)) if below else ""
        (folder / f"part-{index}.yaml").write_text(f"include: [{listed}]\n")
    return _with_line(text, "include: [part-0.yaml]")


def large(text: str, folder: Path, chance: Random) -> bytes:
    """Large but simple configs."""
    count = 6_000
    kinds = (
        "\n".join(f"key{index}: 1" for index in range(count)),
        f"x: [{', '.join(['1'] * count)}]",
        "data:\n  path:\n" + "\n".join(f"  - file{index}" for index in range(count)),
        f"x: '{'${name}' * count}'",
        f"x: '{'${oc.env:HOME}' * count}'",
        "# " + "x" * 1_000_000,
    )
    return _with_line(text, chance.choice(kinds))


ODD_CONFIGS: dict[str, tuple[Make, int]] = {
    "flipped bytes": (_damaged(flip_bytes), 60),
    "cut short": (_damaged(truncate), 20),
    "a part twice": (_damaged(repeat_a_part), 20),
    "not UTF-8": (_damaged(spoil_utf8), 20),
    "an odd value": (odd_value, 120),
    "an odd reference": (odd_reference, 80),
    "a value elsewhere": (moved_value, 60),
    "an odd key": (odd_key, 30),
    "odd syntax": (odd_syntax, 50),
    "nested deeply": (deep, 12),
    "a bomb": (bomb, 25),
    "an odd include": (odd_include, 40),
    "many includes": (many_includes, 8),
    "large": (large, 4),
}
