"""The options of `shoal bench collectives`, checked before torch is imported."""

import json
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from shoal.bench.sizes import read_size, show_size
from shoal.catalogue.gpus import Link, find_link
from shoal.mistakes import UserMistake, suggestion

SMALLEST = 4096
GROWTH = 4
# In bytes: NCCL's fast paths need chunks that start at such multiples.
ALIGNMENT = 16

Dtype = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Request:
    """What to measure."""

    largest: int | None = None  # bytes; None: the default of the device
    dtype: str = "fp32"
    repeat: int = 20
    seconds: float = 1.0

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> "Request":
        return Request(**json.loads(text))


def make_request(*, largest: int | str | None, dtype: str, repeat: int, seconds: float) -> Request:
    """The request; a UserMistake if an option is invalid."""
    size = read_size(largest, "--largest") if isinstance(largest, str) else largest
    if size is not None and size < SMALLEST:
        raise UserMistake(f"--largest is {show_size(size)}, but must be at least {show_size(SMALLEST)}.")
    if dtype not in get_args(Dtype):
        raise UserMistake(f"--dtype is {dtype}, but must be fp32 or bf16.{suggestion(dtype, get_args(Dtype))}")
    if repeat < 1:
        raise UserMistake(f"--repeat is {repeat}, but must be at least 1.")
    if not seconds > 0:
        raise UserMistake(f"--seconds is {seconds:g}, but must be more than 0.")
    return Request(size, dtype, repeat, seconds)


def named_link(name: str | None) -> Link | None:
    return None if name is None else find_link(name)


def sizes_up_to(largest: int, ranks: int) -> list[int]:
    """Sizes growing by `GROWTH`, up to and including `largest`; rounded down to multiples that split over the ranks."""
    sizes = []
    size = SMALLEST
    while size < largest:
        sizes.append(size)
        size *= GROWTH
    unit = ALIGNMENT * ranks
    return sorted({max(unit, size // unit * unit) for size in (*sizes, largest)})
