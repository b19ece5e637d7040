"""Where records come from: one reader per kind of file, all behind `read_records`."""

from shoal.data.sources.find import find_files
from shoal.data.sources.read import read_records
from shoal.data.sources.record import OnBad, Record, stop

__all__ = ["OnBad", "Record", "find_files", "read_records", "stop"]
