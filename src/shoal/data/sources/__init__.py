"""Where records come from: one reader per kind of file, all behind `read_records`."""

from shoal.data.sources.find import find_files, find_reading
from shoal.data.sources.read import read_records
from shoal.data.sources.record import OnBad, Reading, Record, stop

__all__ = ["OnBad", "Reading", "Record", "find_files", "find_reading", "read_records", "stop"]
