"""Parses and formats sizes, times and bandwidths."""

import re

from shoal.mistakes import UserMistake

# K, M and G alone are binary, as in Slurm and nccl-tests.
_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def read_size(text: str, option: str) -> int:
    """'64MiB' as bytes; `option` is named in the error message."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS:
        raise UserMistake(f"{option} '{text}' is not a size; give bytes, or a number with a unit such as 64MiB.")
    return int(float(match[1]) * _UNITS[match[2]])


def show_size(size: float) -> str:
    """'4 KiB', '1.5 MiB'."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}"


def show_seconds(seconds: float) -> str:
    """'85 µs', '1.23 ms', '2.4 s': three significant digits."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{_three_digits(seconds * factor)} {unit}"
    return f"{_three_digits(seconds)} s"


def show_speed(bytes_per_second: float) -> str:
    """In GB/s, as vendors state theirs, or MB/s."""
    if bytes_per_second < 99.95e6:
        return f"{_three_digits(bytes_per_second / 1e6)} MB/s"
    return f"{_three_digits(bytes_per_second / 1e9)} GB/s"


def _three_digits(value: float) -> str:
    for digits, below in ((2, 9.995), (1, 99.95)):
        if value < below:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"
