"""Mistakes in the data that can be found in a moment, before torch is imported: a wrong path, an unknown format."""

from shoal.config.schema import DataConfig
from shoal.data.formats import choose_format, refuse_pairs
from shoal.data.sources import read_records, stop
from shoal.data.sources.find import VALIDATION, find_files, find_source
from shoal.mistakes import UserMistake

READ_FROM_FILES = ("json", "text")
LARGE = 1 << 26  # bytes


def check_first_record(data: DataConfig) -> None:
    """A UserMistake if there are no files, or if their first record has no known format."""
    if data.source == "chess" and data.path is None:
        return
    source = find_source(data.source, data.path)
    files = find_files(source, data.path)
    if isinstance(data.validation, str):
        find_files(find_source(data.source, data.validation), data.validation, VALIDATION)
    if source not in READ_FROM_FILES:
        return
    if files[0].suffix == ".json" and files[0].is_file() and files[0].stat().st_size > LARGE:
        return  # it would be read to its end
    on_bad = ignore if data.on_error == "skip" else stop
    first = next(read_records(source, files, on_bad), None)
    if first is not None:
        refuse_pairs(choose_format(data.format, first))


def ignore(mistake: UserMistake) -> None:
    """With data.on_error skip, a bad record is not a mistake."""
