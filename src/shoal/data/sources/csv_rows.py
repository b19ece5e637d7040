"""CSV and TSV: one record per row, whose keys are the header's."""

import csv
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from shoal.catalogue.data_files import uncompressed_suffix
from shoal.data.sources.compressed import open_data
from shoal.data.sources.record import OnBad, Record
from shoal.mistakes import UserMistake


def read_csv(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """The first row has the names of the columns. Quoted fields may hold line ends, and have any length."""
    csv.field_size_limit(sys.maxsize)
    with open_data(file) as stream:
        delimiter = "\t" if uncompressed_suffix(file.name) == ".tsv" else ","
        rows = _rows(csv.reader(_lines(stream), delimiter=delimiter, strict=True), file, on_bad)
        line, header = next(rows, (1, []))
        if not header:
            on_bad(UserMistake(f"{file} is empty. Remove it, or set data.on_error: skip."))
            return
        repeated = [name for name, count in Counter(header).items() if count > 1]
        if repeated:
            problem = f"has a header that names {repeated[0] or 'an unnamed column'!r} more than once"
            on_bad(UserMistake(f"{file}:{line} {problem}. Rename the columns, or set data.on_error: skip."))
            return
        width, empty = len(header), True
        for line, row in rows:
            empty = False
            if len(row) == width:
                yield Record(dict(zip(header, row, strict=True)), file, line)
            else:
                on_bad(_bad_row(file, line, f"it has {len(row)} fields, but the header has {width} ({_shown(header)})"))
        if empty:
            on_bad(UserMistake(f"{file} has a header and no rows. Remove it, or set data.on_error: skip."))


def _lines(stream: BinaryIO) -> Iterator[str]:
    # Bytes that are not UTF-8 become surrogates, which no UTF-8 text holds, so that the rows around them can be told
    # apart and the bad one named.
    for number, line in enumerate(stream):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8", errors="surrogateescape")


def _rows(reader: Any, file: Path, on_bad: OnBad) -> Iterator[tuple[int, list[str]]]:
    """The rows that are not blank, each with the line it begins on."""
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            if str(error) == "unexpected end of data":
                # Raised whatever data.on_error says: the quote has swallowed the rest of the file.
                problem = "a quoted field that begins in this row does not end"
                raise UserMistake(f"{file}:{line} is not a row of a CSV file: {problem}. Fix the quotes.") from error
            on_bad(_bad_row(file, line, str(error)))
            continue
        if any(not _is_text(value) for value in row):
            on_bad(_bad_row(file, line, "it is not UTF-8"))
        elif row:
            yield line, row


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _bad_row(file: Path, line: int, problem: str) -> UserMistake:
    return UserMistake(f"{file}:{line} is not a row of this table: {problem}. Fix the row or set data.on_error: skip.")


def _shown(header: list[str], most: int = 8) -> str:
    return ", ".join(header[:most]) + (", …" if len(header) > most else "")
