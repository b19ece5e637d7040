"""What a translation has said so far: the value of each of our keys, and a line for each of theirs."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

Outcome = Literal["became", "no meaning", "not carried"]
BECAME: Outcome = "became"
NO_MEANING: Outcome = "no meaning"
NOT_CARRIED: Outcome = "not carried"

# Facts that our config has no key for, from which values follow once all sources are read (`finish.py`).
WORLD = "=devices in all"
MIN_LR = "=lowest learning rate"
FACT = "="
FOLLOWS = {WORLD: "hardware.devices", MIN_LR: "train.schedule.min_ratio"}


@dataclass(frozen=True)
class Line:
    """A key of theirs, and what became of it."""

    source: str  # the file, or the command
    key: str
    value: Any
    outcome: Outcome
    ours: tuple[tuple[str, Any], ...] = ()  # our keys with their values, if it became something
    says: str = ""  # why, or what differs
    default: bool = False  # not in the source: what the other system does if the key is left out

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {"source": self.source, "key": self.key, "value": self.value}
        if self.outcome == BECAME:
            found["ours"] = dict(self.ours)
        return {**found, "says": self.says, "default": self.default}


@dataclass(frozen=True)
class Given:
    """A value for one of our keys, and who gives it."""

    value: Any
    source: str
    key: str
    theirs: Any  # what their key is
    default: bool

    def with_value(self, value: Any) -> "Given":
        return replace(self, value=value)


@dataclass
class Draft:
    """All sources together. A value that was given goes before another system's default; of two, the later."""

    values: dict[str, Given] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    contradictions: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)  # the names of the files that are translated
    queue: list[Path] = field(default_factory=list)  # files that the sources name, still to be translated

    def put(self, ours: str, given: Given) -> None:
        """Set one of our keys."""
        before = self.values.get(ours)
        if before is not None and before.default < given.default:
            return
        if before is not None and before.default == given.default and before.value != given.value:
            if before.source == given.source:
                self._forget(ours, f"{given.key} decides", NO_MEANING)
            elif not given.default:
                self.contradictions.append(
                    f"{before.source} has {before.key}: {before.theirs}, and {given.source} {given.key}: "
                    f"{given.theirs}; the latter is used for {ours.lstrip(FACT)}."
                )
            self._forget(ours, f"{given.source} has another value")
        elif before is not None and before.value != given.value:
            self._forget(ours, f"{given.source} gives a value")
        self.values[ours] = given

    def get(self, ours: str, default: Any = None) -> Any:
        found = self.values.get(ours)
        return default if found is None else found.value

    def drop(self, ours: str, why: str) -> None:
        """Take a key back: the lines that became it are not carried, and say why."""
        self.values.pop(ours, None)
        self._forget(ours, why)

    def turn(self, ours: str, other: str, value: Any, says: str = "") -> None:
        """Replace one of our keys by another, which `value` is for, in the lines too."""
        given = self.values.pop(ours)
        self.values[other] = given.with_value(value)
        for index, line in enumerate(self.lines):
            if any(key == ours for key, _ in line.ours):
                kept = tuple(pair for pair in line.ours if pair[0] not in (ours, other))
                self.lines[index] = replace(
                    line, ours=(*kept, (other, value)), says="; ".join(filter(None, (line.says, says)))
                )

    def tree(self) -> dict[str, Any]:
        """Our config as nested mappings, with the keys in the order of the schema's blocks."""
        found: dict[str, Any] = {}
        for ours, given in sorted(self.values.items(), key=lambda item: _position(item[0])):
            *blocks, last = ours.split(".")
            below = found
            for block in blocks:
                below = below.setdefault(block, {})
            below[last] = given.value
        return found

    def _forget(self, ours: str, why: str, outcome: Outcome = NOT_CARRIED) -> None:
        for index, line in enumerate(self.lines):
            if any(key == ours for key, _ in line.ours):
                kept = tuple(pair for pair in line.ours if pair[0] != ours)
                if kept:
                    self.lines[index] = replace(line, ours=kept)
                elif line.default:
                    self.lines[index] = replace(line, ours=(), outcome=NO_MEANING, says=why)
                else:
                    self.lines[index] = replace(line, ours=(), outcome=outcome, says=why)


_BLOCKS = ("name", "run_dir", "seed", "model", "adapter", "data", "train", "eval", "parallel", "hardware")


def _position(ours: str) -> tuple[int, ...]:
    block = ours.partition(".")[0]
    return (_BLOCKS.index(block),) if block in _BLOCKS else (len(_BLOCKS),)


def nested_leaves(tree: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Each value of a tree with its dotted key; lists are values."""
    for key, value in tree.items():
        dotted = f"{above}.{key}" if above else str(key)
        if isinstance(value, dict) and value:
            yield from nested_leaves(value, dotted)
        else:
            yield dotted, value
