"""Parquet: one record per row; structs and lists become dictionaries and lists."""

from collections.abc import Iterator
from pathlib import Path

from shoal.data.sources.compressed import load_package
from shoal.data.sources.record import OnBad, Record
from shoal.mistakes import UserMistake

ROWS_AT_ONCE = 256  # so that rows of megabytes do not fill the memory
_BUFFER = 1 << 20  # bytes per column: without it, a whole row group is held


def read_parquet(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """The rows in order. A record's line is the number of its row, from 1."""
    pyarrow = load_package("pyarrow", f"{file} is a Parquet file, which")
    parquet = load_package("pyarrow.parquet", f"{file} is a Parquet file, which")
    number = 0
    try:
        with parquet.ParquetFile(str(file), pre_buffer=False, buffer_size=_BUFFER) as opened:
            for batch in opened.iter_batches(ROWS_AT_ONCE, use_threads=False):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(fields, file, number)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.strerror is not None:
            raise
        reason = " ".join(str(error).split()).rstrip(".")
        after = f" after row {number:,}" if number else ""
        raise UserMistake(
            f"{file} cannot be read as Parquet{after} ({reason}). Make or download it again, or change data.source."
        ) from error
    if not number:
        on_bad(UserMistake(f"{file} has no rows. Remove it, or set data.on_error: skip."))
