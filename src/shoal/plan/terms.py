"""A tree of named amounts in bytes or seconds.

Every result of the forecast is such a tree; tables, plots and JSON are views of it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Term:
    """A leaf with an amount, or a group whose amount is the sum of its parts."""

    name: str
    amount: float
    parts: tuple["Term", ...] = ()

    def leaves(self) -> Iterator["Term"]:
        """The terms without parts."""
        if not self.parts:
            yield self
        for part in self.parts:
            yield from part.leaves()

    def find(self, name: str) -> "Term | None":
        """The first term of this name, depth first."""
        if self.name == name:
            return self
        return next((found for part in self.parts if (found := part.find(name)) is not None), None)

    def as_dict(self, unit: float = 1.0, digits: int = 4) -> Any:
        """Leaves as numbers in `unit`, groups as mappings; the leaves add up to the total."""
        if not self.parts:
            return round(self.amount / unit, digits)
        return {part.name: part.as_dict(unit, digits) for part in self.parts}


def leaf(name: str, amount: float) -> Term:
    return Term(name, amount)


def group(name: str, *parts: Term) -> Term:
    """A term made of those `parts` that are not zero."""
    kept = tuple(part for part in parts if part.amount)
    return Term(name, sum(part.amount for part in kept), kept)


def scaled(term: Term, factor: float) -> Term:
    """The tree with every amount multiplied by `factor`."""
    return Term(term.name, term.amount * factor, tuple(scaled(part, factor) for part in term.parts))
