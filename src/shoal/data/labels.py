"""The classes of labelled examples, and their numbers."""

from collections.abc import Sequence

import numpy as np

from shoal.mistakes import UserMistake, shortened


def number_classes(names: Sequence[str], known: Sequence[str] | None, key: str) -> tuple[list[str], np.ndarray]:
    """The classes, in the order of their numbers, and the number of each example's. `known`: the only ones that there
    may be; `key`: the config's name of the data."""
    found = set(names)
    if known is not None and (unknown := sorted(found - set(known))):
        count = sum(name in unknown for name in names)
        raise UserMistake(
            f"{count:,} examples in {key} have a label that no training example has, such as {shortened(unknown[0])}; "
            f"the classes are {shortened(', '.join(known))}."
        )
    if known is None and len(found) < 2:
        raise UserMistake(
            f"All examples in {key} have the label {shortened(names[0])}: there is nothing to tell apart. Check "
            "data.label."
        )
    numeric = all(name.lstrip("-").isdecimal() for name in found)
    classes = list(known) if known is not None else sorted(found, key=int if numeric else None)
    numbers = {name: number for number, name in enumerate(classes)}
    return classes, np.array([numbers[name] for name in names], dtype=np.int32)
