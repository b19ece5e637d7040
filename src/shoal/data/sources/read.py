"""Read the records of any source. Lazy, and always in the same order.

A new source is one reader and one line in `READERS`.
"""

from collections.abc import Callable, Iterator

from shoal.catalogue.data_files import SUFFIXES
from shoal.data.sources.chess import read_chess
from shoal.data.sources.columns import check_columns, rename_columns
from shoal.data.sources.csv_rows import read_csv
from shoal.data.sources.hf import read_hf
from shoal.data.sources.json_records import read_json
from shoal.data.sources.parquet import read_parquet
from shoal.data.sources.record import OnBad, Reading, Record, file_by_file, stop
from shoal.data.sources.text import read_text
from shoal.mistakes import UserMistake

Reader = Callable[[Reading, OnBad], Iterator[Record]]
TOKENS = "tokens"  # has no records: its files are memory-mapped as they are (data/token_files.py)
CELLS = "cells"  # neither: cells are tokenized in slabs of many (data/cells)


READERS: dict[str, Reader] = {
    "json": file_by_file(read_json),
    "text": file_by_file(read_text),
    "parquet": file_by_file(read_parquet),
    "csv": file_by_file(read_csv),
    "hf": read_hf,
    "chess": file_by_file(read_chess),
}
SOURCES = (*READERS, TOKENS, CELLS)


def read_records(reading: Reading, on_bad: OnBad = stop) -> Iterator[Record]:
    """The records of `reading`, in order, read lazily, with the names of the formats."""
    check_source(reading.source)
    check_columns(reading.columns)
    if reading.source == TOKENS:
        raise UserMistake("data.source tokens holds token ids, which are not records.")
    if reading.source == CELLS:
        raise UserMistake("data.source cells holds expression of genes, which is not text.")
    records = READERS[reading.source](reading, on_bad)
    return rename_columns(records, reading.columns, on_bad) if reading.columns else records


def check_source(source: str) -> None:
    """A UserMistake if there is no reader for this `data.source`."""
    if source not in SOURCES:
        raise UserMistake(f"data.source {source} is not supported. Supported sources: {', '.join(SOURCES)}.")


def folder_suffixes(source: str) -> tuple[str, ...] | None:
    """Which files of a folder this source reads; None: all."""
    if source in ("text", "hf"):
        return None
    return (*SUFFIXES[source], ".txt") if source == "chess" else SUFFIXES[source]
