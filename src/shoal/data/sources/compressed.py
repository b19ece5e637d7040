"""Open a data file, compressed or not, as a stream of bytes that never has to fit in memory."""

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from shoal.mistakes import UserMistake

_BUFFER, _LEAST = 1 << 18, 1 << 6  # bytes


@contextmanager
def open_data(file: Path) -> Iterator[BinaryIO]:
    """The bytes of `file`, decompressed if its name ends with .gz or .zst. A damaged archive is a UserMistake, which
    may come after its first bytes have been read."""
    suffix = file.suffix.lower()
    if suffix not in (".gz", ".zst"):
        with file.open("rb") as stream:
            yield stream
        return
    zstandard = load_package("zstandard", f"{file} is compressed with zstd, which") if suffix == ".zst" else None
    damaged = (EOFError, gzip.BadGzipFile, zlib.error, *([zstandard.ZstdError] if zstandard else []))
    try:
        with file.open("rb") as raw:
            if zstandard is None:
                with gzip.GzipFile(fileobj=raw) as unpacked:
                    yield cast(BinaryIO, io.BufferedReader(unpacked, _BUFFER))
            else:
                yield cast(BinaryIO, io.BufferedReader(_ZstdStream(raw, zstandard), _BUFFER))
    except damaged as error:
        reason = str(error).rstrip(".")
        raise UserMistake(
            f"{file} is a damaged or incomplete {suffix} archive ({reason}). Make or download it again."
        ) from error


class _ZstdStream(io.RawIOBase):
    """The decompressed bytes of one or more zstd frames. Unlike the reader of the zstandard package, it raises when the
    file ends inside a frame."""

    def __init__(self, raw: BinaryIO, zstandard: Any) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj
        self._current: Any = None
        self._left, self._ready = b"", memoryview(b"")
        self._at_once = _LEAST  # compressed bytes: as many as give about one buffer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._left or self._raw.read(self._at_once)
            self._left = b""
            if not data:
                if self._current is not None:
                    raise EOFError("the file ends inside a frame")
                return 0
            if self._current is None:
                self._current = self._frame()
            self._ready = memoryview(self._current.decompress(data))
            self._at_once = min(max(_BUFFER * len(data) // max(len(self._ready), 1), _LEAST), _BUFFER)
            if self._current.eof:
                self._left, self._current = self._current.unused_data, None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def load_package(name: str, needed_by: str) -> Any:
    """The package, which is an extra: a UserMistake if it is not installed."""
    try:
        return import_module(name)
    except ImportError:
        package = name.partition(".")[0]
        raise UserMistake(f"{needed_by} needs the package {package}: pip install 'shoal[data]'.") from None
