"""What a sweep varies: `key=a,b` are values, `key=log(1e-5,1e-3)` is a range, `key=a` is the same in every member."""

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, product

from shoal.mistakes import UserMistake, suggestion

MOST_MEMBERS = 1000
OPENING, CLOSING = "([{", ")]}"
_RANGE = re.compile(r"(\w+)\((.*)\)")
# Draws of random values in a row that were all drawn before, until the space counts as exhausted.
_PATIENCE = 200

Overrides = tuple[str, ...]


@dataclass(frozen=True)
class Values:
    """A key with a list of values, as they were written."""

    key: str
    values: tuple[str, ...]

    def draw(self, source: random.Random) -> str:
        return source.choice(self.values)


@dataclass(frozen=True)
class Range:
    """A key with a range of numbers, both ends included."""

    key: str
    low: float
    high: float
    logarithmic: bool = False
    whole: bool = False

    def draw(self, source: random.Random) -> str:
        # Whole numbers as equally wide intervals, so that both ends are as likely as the others.
        low, high = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        drawn = (
            math.exp(source.uniform(math.log(low), math.log(high))) if self.logarithmic else source.uniform(low, high)
        )
        return self.written(min(max(drawn, self.low), self.high))

    def written(self, value: float) -> str:
        return str(round(value)) if self.whole else f"{value:.4g}"


# name → (logarithmic, whole)
RANGES = {"uniform": (False, False), "log": (True, False), "int": (False, True), "log_int": (True, True)}


@dataclass(frozen=True)
class Space:
    """The keys that vary, and the overrides that do not."""

    fixed: Overrides
    varied: tuple[Values | Range, ...]

    def grid(self) -> list[Overrides]:
        """Every combination, the last key fastest."""
        for axis in self.varied:
            if isinstance(axis, Range):
                raise UserMistake(
                    f"{axis.key} has a range, of which a grid cannot have every value; add --random N or --optuna N, "
                    f"or list the values: {axis.key}={axis.written(axis.low)},{axis.written(axis.high)}"
                )
        count = math.prod(len(axis.values) for axis in self.varied if isinstance(axis, Values))
        check_count(count, "The grid")
        combined = product(*(axis.values for axis in self.varied if isinstance(axis, Values)))
        return [self.assign(values) for values in combined]

    def draw(self, count: int, seed: int) -> list[Overrides]:
        """`count` different random members. More with the same seed begin with the same."""
        check_count(count, "--random")
        found = list(islice(self._draws(seed), count))
        if len(found) < count:
            raise UserMistake(f"--random {count} asks for more members than there are different ones, {len(found)}.")
        return found

    def _draws(self, seed: int) -> Iterator[Overrides]:
        source, seen, repeated = random.Random(seed), set(), 0
        while repeated < _PATIENCE:
            drawn = self.assign([axis.draw(source) for axis in self.varied])
            repeated = repeated + 1 if drawn in seen else 0
            if not repeated:
                seen.add(drawn)
                yield drawn

    def assign(self, values: Sequence[str]) -> Overrides:
        return tuple(f"{axis.key}={value}" for axis, value in zip(self.varied, values, strict=True))


def check_count(count: int, what: str) -> None:
    if count > MOST_MEMBERS:
        raise UserMistake(
            f"{what} has {count:,} members, more than {MOST_MEMBERS:,}; give fewer values, or draw some: --random N."
        )


def read_space(arguments: Sequence[str]) -> Space:
    """The space that the overrides of a command line describe."""
    fixed: list[str] = []
    varied: list[Values | Range] = []
    keys: set[str] = set()
    for text in arguments:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserMistake(
                f"override {text} has no value: write {text}=VALUE, or {text}=VALUE,VALUE to sweep over it."
            )
        if key in keys:
            raise UserMistake(f"override {text}: {key} was given before; write all of its values in one: {key}=A,B")
        if key in ("name", "run_dir"):
            where = "--name NAME" if key == "name" else "--runs DIR"
            raise UserMistake(f"override {text}: a sweep names the folders of its members; give it {where}.")
        keys.add(key)
        if (matched := _RANGE.fullmatch(value.strip())) is not None:
            varied.append(_read_range(key, matched[1], matched[2], text))
            continue
        values = split_values(value, text)
        if len(values) == 1:
            fixed.append(text)
        else:
            varied.append(Values(key, values))
    return Space(tuple(fixed), tuple(varied))


def split_values(text: str, override: str) -> tuple[str, ...]:
    """Split at the commas outside of brackets and quotes: `[a,b],[c]` are two lists, `"a,b"` is one string."""
    depth, quote, begin, found = 0, "", 0, []
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'" and text[:index].rstrip()[-1:] in ("", *"[{(,:"):  # an apostrophe in a word is none
            quote = character
        elif character in OPENING:
            depth += 1
        elif character in CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            found.append(text[begin:index].strip())
            begin = index + 1
    found.append(text[begin:].strip())
    if len(found) == 1:
        return tuple(found)
    if "" in found:
        raise UserMistake(f'override {override}: a value between commas is empty; write "" for an empty string.')
    if repeated := sorted({value for value in found if found.count(value) > 1}):
        raise UserMistake(f"override {override}: {repeated[0]} is there twice.")
    return tuple(found)


def _read_range(key: str, kind: str, inside: str, override: str) -> Range:
    if kind not in RANGES:
        known = ", ".join(f"{name}(LOW,HIGH)" for name in RANGES)
        raise UserMistake(
            f"override {override}: {kind}(…) is not a range; there are {known}.{suggestion(kind, RANGES)}"
        )
    logarithmic, whole = RANGES[kind]
    try:
        low, high = (float(end) for end in inside.split(","))
    except ValueError:
        raise UserMistake(f"override {override}: a range has two numbers, such as {kind}(1,8).") from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserMistake(f"override {override}: the first number of a range must be less than the second.")
    if logarithmic and low <= 0:
        raise UserMistake(f"override {override}: a logarithmic range must begin above 0; or use uniform or int.")
    if whole and not (low.is_integer() and high.is_integer()):
        raise UserMistake(f"override {override}: {kind}(…) needs whole numbers.")
    return Range(key, low, high, logarithmic, whole)
