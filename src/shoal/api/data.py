"""Look at data before training on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.api.arguments import as_list, check_at_least

if TYPE_CHECKING:
    from shoal.train.inspect import DataPreview, DataStats


def data_preview(
    file: Path | str | None,
    overrides: Sequence[str] = (),
    *,
    examples: int = 3,
    first: int = 0,
    seed: int | None = None,
    sequences: bool = False,
    report: Callable[[str], None] = lambda _: None,
) -> DataPreview:
    """Decode `examples` examples of the data, from the record `first` on, or drawn at random with `seed`.

    `file` is a config, a run's folder, or a data file or folder; with None, `overrides` name the data. With
    `sequences`, packed sequences are decoded instead. Reads only the first records, and imports torch only if the
    tokenizer's library does.
    """
    from shoal.data.inspect.packed import Choice
    from shoal.train.inspect import preview_data

    check_at_least("examples", examples, 1)
    check_at_least("first", first, 0)
    choice = Choice(count=examples, first=first, seed=seed, sequences=sequences)
    return preview_data(file, as_list(overrides), choice=choice, drawn=seed is not None, report=report)


def data_stats(
    file: Path | str | None, overrides: Sequence[str] = (), *, report: Callable[[str], None] = lambda _: None
) -> DataStats:
    """Describe all of the data: lengths, truncation, duplicates, packing, and the steps of a run with it.

    `file` is as in `data_preview`. The data is tokenized into the cache, where training finds it.
    """
    from shoal.train.inspect import measure_data

    return measure_data(file, as_list(overrides), report=report)
