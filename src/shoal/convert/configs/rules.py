"""How one key of another system is translated: a table of these is a system (`System`)."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.config.foreign_keys import our_key
from shoal.convert.configs.draft import (
    BECAME,
    FOLLOWS,
    NO_MEANING,
    NOT_CARRIED,
    Draft,
    Given,
    Line,
    Outcome,
    nested_leaves,
)

Tree = dict[str, Any]
# A file with the rest of a command's keys, if it was not found.
MISSING_FILE = "config"
_VARIABLE = re.compile(r"\$[\w{(]")


@dataclass(frozen=True)
class Source:
    """A file or a command: the keys and values that it holds, in its system's words."""

    name: str
    system: "System"
    tree: Tree
    folder: str = "."  # where files that it names are


@dataclass
class Key:
    """A key of theirs while it is translated."""

    source: Source
    name: str
    value: Any
    draft: Draft
    default: bool = False
    above: str = ""  # the key that holds a whole config of this system, such as a Trainer's `deepspeed`

    @property
    def last(self) -> str:
        return self.name.rpartition(".")[2]

    def become(self, ours: str, value: Any, says: str = "") -> None:
        """This key is `ours`; may be called for several of them."""
        self.draft.put(ours, Given(value, self.source.name, self.shown, self.value, self.default))
        taken = self.draft.values[ours]
        if taken.value != value or taken.default != self.default:
            return  # a value that was given is kept
        lines = self.draft.lines
        if (
            lines
            and lines[-1].outcome == BECAME
            and (lines[-1].source, lines[-1].key) == (self.source.name, self.shown)
        ):
            says = "; ".join(filter(None, (lines[-1].says, says if says != lines[-1].says else "")))
            self._add(BECAME, says, (*(pair for pair in lines.pop().ours if pair[0] != ours), (ours, value)))
        else:
            self._add(BECAME, says, ((ours, value),))

    def collect(self, ours: str, item: Any) -> None:
        """This key adds `item` to a list of ours."""
        before = self.draft.values.pop(ours, None)
        self.become(ours, [*([] if before is None or before.default else before.value), item])

    def no_meaning(self, why: str) -> None:
        """Nothing has to be set for it here."""
        if not self.default:
            self._add(NO_MEANING, why)

    def not_carried(self, why: str) -> None:
        """It means something that this config cannot say."""
        if not self.default:
            self._add(NOT_CARRIED, why)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of another key of the same source; the system's default if it is not there."""
        found = at(self.source.tree, name)
        if found is None:
            found = self.source.system.defaults.get(name)
        return default if found is None else found

    @property
    def shown(self) -> str:
        return f"{self.above}.{self.name}" if self.above else self.name

    def _add(self, outcome: Outcome, says: str, ours: tuple[tuple[str, Any], ...] = ()) -> None:
        self.draft.lines.append(Line(self.source.name, self.shown, self.value, outcome, ours, says, self.default))


@dataclass(frozen=True)
class Rule:
    """How a key is translated; `ours` and `says` are for the table of words in the documentation."""

    translate: Callable[[Key], None]
    ours: tuple[str, ...] = ()
    says: str = ""
    takes_null: bool = False  # null is a value, and not the same as leaving the key out
    takes_auto: bool = False  # and so is the word auto
    verbatim: bool = False  # variables of the shell are kept as they are


@dataclass(frozen=True)
class System:
    """Another training system's config."""

    name: str
    keys: Mapping[str, Rule]
    marks: frozenset[str]  # keys by which such a file is recognised
    # What the system does where a key is left out, if that is not what shoal does.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # The defaults may depend on what is there.
    more_defaults: Callable[[Tree], Mapping[str, Any]] | None = None
    auto: str = ""  # what the value `auto` means in it
    # A key that no name in `keys` matches may be one of a family of them.
    other: Callable[[str], Rule | None] = lambda name: None
    extends: "System | None" = None  # the system whose keys it has too


def at(tree: Tree, name: str) -> Any:
    """The value at a dotted key, or None."""
    found: Any = tree
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def same(value: Any) -> Any:
    return value


def to(ours: str, convert: Callable[[Any], Any] = same, says: str = "", *, takes_null: bool = False) -> Rule:
    """The key is `ours`, and its value what `convert` makes of it, which raises ValueError for what it cannot."""

    def translate(key: Key) -> None:
        key.become(ours, None if key.value is None else convert(key.value), says)

    return Rule(translate, (FOLLOWS.get(ours, ours),), says, takes_null)


def word(name: str, convert: Callable[[Any], Any] = same, says: str = "", *, takes_null: bool = False) -> Rule:
    """The same for a name whose meaning is in the table of other tools' words (`config/foreign_keys.py`)."""
    ours = our_key(name.split("."))
    assert ours is not None, name
    return to(ours.key, convert, says, takes_null=takes_null)


def words(names: str, convert: Callable[[Any], Any] = same, above: str = "") -> dict[str, Rule]:
    """Several such names, in the block `above`."""
    return {f"{above}.{name}" if above else name: word(name, convert) for name in names.split()}


def nothing(why: str, names: str, above: str = "") -> dict[str, Rule]:
    """Keys for which nothing has to be set here."""
    rule = Rule(lambda key: key.no_meaning(why), says=why)
    return {f"{above}.{name}" if above else name: rule for name in names.split()}


def cannot(why: str, names: str, above: str = "", *, unless: tuple[Any, ...] = (False, "", 0)) -> dict[str, Rule]:
    """Keys that mean something our config cannot say, unless they are off."""

    def translate(key: Key) -> None:
        if any(key.value == off and isinstance(key.value, bool) == isinstance(off, bool) for off in unless):
            key.no_meaning("off")
        else:
            key.not_carried(why)

    rule = Rule(translate, says=why)
    return {f"{above}.{name}" if above else name: rule for name in names.split()}


def rule(*ours: str, says: str = "", takes_null: bool = False, takes_auto: bool = False) -> Callable[..., Rule]:
    """Make a rule of a function that calls `become`, `no_meaning` or `not_carried` of its key."""

    def made(function: Callable[[Key], None]) -> Rule:
        return Rule(function, ours, says, takes_null, takes_auto)

    return made


def under(above: str, table: Mapping[str, Rule]) -> dict[str, Rule]:
    """A table of rules for the keys of the block `above`."""
    return {f"{above}.{name}": rule for name, rule in table.items()}


def translate(source: Source, draft: Draft, systems: tuple[System, ...] = (), above: str = "") -> None:
    """Translate each key of a source, and after them what its system does by default."""
    system = source.system
    handled: set[str] = set()
    _walk(source, source.tree, "", draft, systems, above, handled)
    if MISSING_FILE in source.tree:
        return  # what is left out here may be there
    defaults = dict(system.defaults) | dict(system.more_defaults(source.tree) if system.more_defaults else {})
    for name, value in defaults.items():
        given = at(source.tree, name)
        if value is not None and given is None and name not in handled and name in system.keys:
            _apply(system.keys[name], Key(source, name, value, draft, default=True, above=above))


def _walk(
    source: Source, tree: Tree, path: str, draft: Draft, systems: tuple[System, ...], above: str, handled: set[str]
) -> None:
    for part, value in tree.items():
        name = f"{path}.{part}" if path else str(part)
        found = source.system.keys.get(name) or source.system.other(name)
        key = Key(source, name, value, draft, above=above)
        # LitGPT's `optimizer` is a name, or a block of which each key has a rule.
        block = isinstance(value, dict) and bool(value)
        if block and (found is None or any(one.startswith(f"{name}.") for one in source.system.keys)):
            _walk(source, value, name, draft, systems, above, handled)
        elif found is None:
            _unknown(key, systems)
        elif value is None and not found.takes_null:
            key.no_meaning("not set")
        elif isinstance(value, str) and _VARIABLE.search(value) and not found.verbatim:
            key.not_carried("depends on a variable whose value is not in the file")
        else:
            if value is None or found.takes_null:
                handled.add(name)
            if value == "auto" and source.system.auto and not found.takes_auto:
                key.no_meaning(source.system.auto)
            else:
                _apply(found, key)


def _apply(found: Rule, key: Key) -> None:
    before = len(key.draft.lines)
    try:
        found.translate(key)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:  # a value of another kind
        key.not_carried(str(error) if isinstance(error, ValueError) else "is not a value that shoal understands here")
    # A rule that says nothing would drop its key silently.
    if len(key.draft.lines) == before and not key.default:
        key.no_meaning("another key decides")


def _unknown(key: Key, systems: tuple[System, ...]) -> None:
    if key.value is None or key.value == {} or key.value == []:
        key.no_meaning("not set")
        return
    if key.name == MISSING_FILE:
        if str(key.value).rpartition("/")[2] in key.draft.named:
            key.no_meaning("that file is translated too")
        else:
            key.not_carried("names a file that is not there: give it as another FILE")
        return
    others = [one.name for one in systems if one is not key.source.system and _knows(one, key.name)]
    ours = our_key(key.name.split("."))
    if ours is not None:
        key.not_carried(f"not a key of {key.source.system.name} that shoal knows; perhaps {ours}: set it by hand")
    elif others:
        key.not_carried(f"not a key of {key.source.system.name} that shoal knows, but one of {others[0]}")
    else:
        key.not_carried(f"not a key of {key.source.system.name} that shoal knows")


def _knows(system: System, name: str) -> bool:
    return name in system.keys or system.other(name) is not None


def keys_in(tree: Tree) -> set[str]:
    """The dotted keys of a tree, blocks and values."""
    found: set[str] = set()
    for name, _ in nested_leaves(tree):
        parts = name.split(".")
        found |= {".".join(parts[:length]) for length in range(1, len(parts) + 1)}
    return found
