"""Shared by all blocks of the config: strictness, numeric bounds, spellings, and errors about contradicting keys."""

from collections.abc import Mapping
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel, BeforeValidator, ConfigDict, Strict
from pydantic_core import PydanticCustomError

# The upper bounds are far above what anyone can mean. They refuse a slip of the keyboard before the forecast or the
# training loop computes with it, and keep every product of sizes within a float and every count within 64 bits.
MOST, MOST_IN_SIZE, MOST_LAYERS, MOST_DEGREE = 10**18, 10**9, 10**5, 2**10
Count = Annotated[int, Ge(1), Le(MOST)]
CountOrZero = Annotated[int, Ge(0), Le(MOST)]
Size = Annotated[int, Ge(1), Le(MOST_IN_SIZE)]  # sequences, tokens, devices, the dimensions of a matrix
Layers = Annotated[int, Ge(1), Le(MOST_LAYERS)]
Degree = Annotated[int, Ge(1), Le(MOST_DEGREE)]  # of parallelism
Positive = Annotated[float, Gt(0), Le(1e38)]  # within fp32
PositiveOrZero = Annotated[float, Ge(0), Le(1e38)]
Quantity = Annotated[float, Ge(1e-6), Le(1e9)]  # of hardware: memory, bandwidth, latency, price
Seconds = Annotated[float, Gt(0), Le(1e9)]  # what clocks and timeouts of the operating system can count
Share = Annotated[float, Ge(0), Le(1)]
ShareBelowOne = Annotated[float, Ge(0), Lt(1)]
# YAML has lists; a frozen config needs tuples. Only the container is lenient, not its items.
Texts = Annotated[tuple[str, ...], Strict(False)]


class Block(BaseModel):
    """A block of the config: unknown keys and wrong types are refused, and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        # Building validators for blocks that are only validated inside Config would dominate the import time.
        defer_build=True,
        strict=True,
        validate_default=True,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        # Pydantic reserves the prefix `model_`; none of our keys collide with its methods.
        protected_namespaces=(),
    )


def spelled(choices: tuple[str, ...], also: Mapping[str, str] | None = None) -> BeforeValidator:
    """Accept `choices` in any case, with - or _, and the names other tools use for them (`also`)."""
    known = {_plain(choice): choice for choice in choices}
    known.update({_plain(other): choice for other, choice in (also or {}).items()})

    def normalize(value: Any) -> Any:
        # `precision: 32` is a number in YAML. Booleans are values of their own.
        if isinstance(value, str | int) and not isinstance(value, bool):
            return known.get(_plain(str(value)), value)
        return value

    return BeforeValidator(normalize)


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def contradiction(sentence: str, *keys: str) -> PydanticCustomError:
    """An error about several `keys` of one block, to be raised by that block; the first key given names the line."""
    return PydanticCustomError("contradiction", "{sentence}", {"sentence": sentence, "keys": keys})
