"""Mistakes in the data that can be found in a moment, before torch is imported: a wrong path, an unknown format."""

from shoal.config.schema import DataConfig
from shoal.data.cells.source import check_cells
from shoal.data.formats.choose import check_pairs, choose_format
from shoal.data.sources import Reading, find_reading, read_records, stop
from shoal.data.sources.hf import parse_split
from shoal.data.sources.json_records import is_array
from shoal.data.token_files import check_tokenized
from shoal.mistakes import UserMistake

LARGE = 1 << 26  # bytes
FEW = 16  # files of cells that are opened


def check_first_record(data: DataConfig, objective: str = "causal_lm") -> None:
    """A UserMistake if there are no files, or if their first record has no known format or none for `objective`."""
    for block, _ in data.blocks():
        if block.source != "chess" or block.path is not None:
            _check(block, find_reading(block), objective)
    if isinstance(data.validation, str):
        whole = data if isinstance(data.source, str) else data.model_copy(update={"source": "auto"})
        _check(whole, find_reading(whole, data.validation), objective)


def _check(data: DataConfig, reading: Reading, objective: str) -> None:
    if reading.source == "tokens":
        check_tokenized(data, objective=objective)
    if reading.source == "cells":
        check_cells(data, reading.files[:FEW], objective)
    on_bad = ignore if data.on_error == "skip" else stop
    first = next(read_records(reading, on_bad), None) if _is_quick(reading) else None
    if first is not None:
        check_pairs(choose_format(data.format, first, objective), objective)


def _is_quick(reading: Reading) -> bool:
    """Whether the first record is found without reading much more."""
    if reading.source in ("tokens", "chess", "cells"):
        return False
    if reading.source == "hf":
        return not parse_split(reading.split).needs_length
    first = reading.files[0]
    whole = reading.source == "text" or (reading.source == "json" and is_array(first))
    return not (whole and first.is_file() and first.stat().st_size > LARGE)


def ignore(mistake: UserMistake) -> None:
    """With data.on_error skip, a bad record is not a mistake."""
