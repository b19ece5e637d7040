"""Parsing of message sizes, and formatting of sizes and times."""

import pytest

from shoal.bench.collectives_request import sizes_up_to
from shoal.bench.sizes import read_size, show_seconds, show_size, show_speed
from shoal.mistakes import UserMistake


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("64MiB", 64 * 2**20), ("64M", 64 * 2**20), ("1.5 GiB", 3 * 2**29), ("2MB", 2_000_000), ("8b", 8)],
)
def test_a_size_is_read_with_or_without_a_unit(text: str, size: int) -> None:
    assert read_size(text, "--largest") == size


@pytest.mark.parametrize("text", ["", "MiB", "64Q", "-1", "1e6", "inf", "64 MiB or so"])
def test_an_invalid_size_is_a_mistake(text: str) -> None:
    with pytest.raises(UserMistake, match="is not a size; give bytes"):
        read_size(text, "--largest")


def test_sizes_grow_to_the_largest_and_are_divisible_by_the_ranks() -> None:
    assert sizes_up_to(262144, 2) == [4096, 16384, 65536, 262144]
    assert sizes_up_to(5000, 2) == [4096, 4992]
    assert sizes_up_to(4096, 3) == [4080]
    assert sizes_up_to(4096, 1024) == [16384]
    assert all(size % (16 * 6) == 0 for size in sizes_up_to(2**28, 6))


def test_values_are_printed_with_three_digits_and_a_unit() -> None:
    assert [show_size(size) for size in (512, 4096, 4992, 3 * 2**29)] == ["512 B", "4 KiB", "4.875 KiB", "1.5 GiB"]
    seconds = (8.5e-7, 8.54e-5, 1.234e-3, 2.5)
    assert [show_seconds(one) for one in seconds] == ["0.85 µs", "85.4 µs", "1.23 ms", "2.50 s"]
    assert [show_speed(one) for one in (4.71e6, 2e9, 450e9)] == ["4.71 MB/s", "2.00 GB/s", "450 GB/s"]
