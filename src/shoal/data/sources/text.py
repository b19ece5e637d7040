"""Plain text and source code: one document per file."""

import codecs
from collections.abc import Iterator
from pathlib import Path

from shoal.data.sources.compressed import open_data
from shoal.data.sources.record import OnBad, Record
from shoal.mistakes import UserMistake

# A text file is read in chunks of about this many bytes, split after a line where possible, so that neither its
# text nor its token ids must fit in memory at once. Chunks are tokenized independently: at most one word per million
# bytes is tokenized differently than in a single call.
CHUNK = 1 << 20


def read_text(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """One document per file, compressed or not. Line ends are kept; a leading byte order mark is dropped."""
    try:
        size, bad = _first_undecodable(file)
    except UserMistake as damaged:
        on_bad(damaged)
        return
    if size == 0:
        on_bad(UserMistake(f"{file} is empty. Remove it, or set data.on_error: skip."))
    elif bad is not None:
        on_bad(
            UserMistake(
                f"{file} is not UTF-8: the byte at offset {bad} cannot be decoded. Convert the file, take it out of "
                "the data, or set data.on_error: skip."
            )
        )
    else:
        yield from _text_chunks(file)


def _text_chunks(file: Path) -> Iterator[Record]:
    with open_data(file) as stream:
        block = stream.read(CHUNK)
        rest = block[len(codecs.BOM_UTF8) :] if block.startswith(codecs.BOM_UTF8) else block
        while block:
            block = stream.read(CHUNK)
            if block:
                split = _split_point(rest)
                yield Record({"text": rest[:split].decode()}, file, continued=True, read=stream.tell())
                rest = rest[split:] + block
    yield Record({"text": rest.decode()}, file)


def _split_point(data: bytes) -> int:
    """Where to split: after the last line, or at least not inside a character."""
    line = data.rfind(b"\n") + 1
    if line:
        return line
    split = len(data) - 1
    while split > 0 and data[split] & 0xC0 == 0x80:
        split -= 1
    return split


def _first_undecodable(file: Path) -> tuple[int, int | None]:
    """The number of bytes, and the offset of the first that is not UTF-8 (then the number is of those up to it)."""
    # Checked before the first chunk is yielded: a file is used completely or not at all.
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with open_data(file) as stream:
        while True:
            block = stream.read(CHUNK)
            buffered = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return (found := read - buffered + error.start) + 1, found
            if not block:
                return read, None
            read += len(block)
