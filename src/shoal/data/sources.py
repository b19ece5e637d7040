"""Read records from files: dictionaries with their file and line. Lazy, and always in the same order."""

import codecs
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.mistakes import UserMistake

# A text file is read in chunks of about this many bytes, split after a line where possible, so that neither its
# text nor its token ids must fit in memory at once. Chunks are tokenized independently: at most one word per million
# bytes is tokenized differently than in a single call.
CHUNK = 1 << 20

# Handles a mistake in one record or file: raises it (data.on_error: stop) or counts it and returns (skip).
OnBad = Callable[[UserMistake], None]


@dataclass(frozen=True, slots=True)
class Record:
    """One record of a source. `continued`: the next record continues the same document."""

    fields: dict[str, Any]
    file: Path
    line: int | None = None
    continued: bool = False

    @property
    def where(self) -> str:
        return str(self.file) if self.line is None else f"{self.file}:{self.line}"


def stop(mistake: UserMistake) -> None:
    raise mistake


def read_records(source: str, files: Sequence[Path], on_bad: OnBad = stop) -> Iterator[Record]:
    """The records of `files`, in order, read lazily."""
    check_source(source)
    reader = _READERS[source]
    for file in files:
        try:
            yield from reader(file, on_bad)
        except OSError as error:
            raise UserMistake(
                f"{file} cannot be read ({error.strerror}). Check the path and its permissions."
            ) from error


def _read_text(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """One document per file. Line ends are kept; a leading byte order mark is dropped."""
    size = file.stat().st_size
    bad = _first_undecodable(file)
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
    with file.open("rb") as stream:
        block = stream.read(CHUNK)
        rest = block[len(codecs.BOM_UTF8) :] if block.startswith(codecs.BOM_UTF8) else block
        while block:
            block = stream.read(CHUNK)
            if block:
                split = _split_point(rest)
                yield Record({"text": rest[:split].decode()}, file, continued=True)
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


def _first_undecodable(file: Path) -> int | None:
    # Checked before the first chunk is yielded: a file is used completely or not at all.
    decoder = codecs.getincrementaldecoder("utf-8")()
    read = 0
    with file.open("rb") as stream:
        while True:
            block = stream.read(CHUNK)
            buffered = len(decoder.getstate()[0])
            try:
                decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                return read - buffered + error.start
            if not block:
                return None
            read += len(block)


def _read_json(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """`.json`: an array of objects (or concatenated objects). Any other suffix: one object per line."""
    reader = _read_json_array if file.suffix.lower() == ".json" else _read_json_lines
    records = 0
    for record in reader(file, on_bad):
        records += 1
        yield record
    with file.open("rb") as stream:
        blank = not records and not stream.read(CHUNK).strip(b"[] \t\r\n" + codecs.BOM_UTF8)
    if blank:
        on_bad(UserMistake(f"{file} is empty. Remove it, or set data.on_error: skip."))


def _read_json_lines(file: Path, on_bad: OnBad) -> Iterator[Record]:
    with file.open("rb") as stream:
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                on_bad(_not_json(file, number, f"{error.msg} at column {error.colno}"))
            except UnicodeDecodeError as error:
                on_bad(_not_json(file, number, f"byte {error.start} of the line is not UTF-8"))
            except RecursionError:
                on_bad(_not_json(file, number, "nested too deeply"))
            except ValueError:
                on_bad(_not_json(file, number, _TOO_LONG))
            else:
                yield from _object(value, file, number, on_bad)


_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER, _DECODER_OF_TEXT, _HUGE = json.JSONDecoder(), json.JSONDecoder(parse_int=str), object()
_TOO_LONG = f"an integer has more than {sys.get_int_max_str_digits()} digits"


def _read_json_array(file: Path, on_bad: OnBad) -> Iterator[Record]:
    # Element by element, so that each record has its line. After a syntax error the start of the next element is
    # unknown: it is raised whatever data.on_error says, because the rest would be lost silently.
    data = file.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise _not_json(file, line, f"the byte at offset {error.start} is not UTF-8") from error
    at = _skip_space(text, 0)
    in_array = text.startswith("[", at)
    if in_array:
        at = _skip_space(text, at + 1)
    line, counted = 1, 0
    closed = not in_array
    while at < len(text):
        line, counted = line + text.count("\n", counted, at), at
        if in_array and text[at] == "]":
            closed = True
            if _skip_space(text, at + 1) != len(text):
                raise _not_json(file, line, "there is more after the end of the array")
            break
        try:
            value, at = _decode(text, at)
        except json.JSONDecodeError as error:
            raise _not_json(file, error.lineno, f"{error.msg} at column {error.colno}") from error
        except RecursionError as error:
            raise _not_json(file, line, "nested too deeply") from error
        if value is _HUGE:
            on_bad(_not_json(file, line, _TOO_LONG, skippable=True))
        else:
            yield from _object(value, file, line, on_bad)
        at = _skip_space(text, at)
        if in_array and at < len(text) and text[at] == ",":
            at = _skip_space(text, at + 1)
            if text.startswith("]", at):
                raise _not_json(
                    file, line + text.count("\n", counted, at), "there is a comma before the end of the array"
                )
        elif in_array and at < len(text) and text[at] != "]":
            raise _not_json(file, line + text.count("\n", counted, at), "a comma is missing between two elements")
    if not closed:
        raise _not_json(file, line + text.count("\n", counted), "the file ends inside the array")


def _decode(text: str, at: int) -> tuple[object, int]:
    """The JSON value at `at` and where it ends; `_HUGE` in place of a value with an integer that Python refuses."""
    try:
        return _DECODER.raw_decode(text, at)
    except (json.JSONDecodeError, RecursionError):
        raise
    except ValueError:
        return _HUGE, _DECODER_OF_TEXT.raw_decode(text, at)[1]


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _object(value: object, file: Path, line: int, on_bad: OnBad) -> Iterator[Record]:
    if isinstance(value, dict):
        yield Record(value, file, line)
    else:
        problem = f"an object with named keys is needed, found a {type(value).__name__}"
        on_bad(_not_json(file, line, problem, skippable=True))


def _not_json(file: Path, line: int, problem: str, skippable: bool = False) -> UserMistake:
    skip = " or set data.on_error: skip" if skippable or file.suffix.lower() != ".json" else ""
    return UserMistake(f"{file}:{line} is not a JSON record: {problem}. Fix the line{skip}.")


def _read_chess(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """One document per game, in UCI moves: one game per line, or a PGN file."""
    from shoal.data import chess_games  # slow to import, and most runs do not need it

    games = chess_games.read_pgn(file) if file.suffix.lower() == ".pgn" else chess_games.read_lines(file)
    found = False
    for game in games:
        found = True
        if game.problem is None:
            yield Record({"text": game.moves}, file, game.line)
        else:
            on_bad(
                UserMistake(
                    f"{file}:{game.line} is not a game of chess: {game.problem}. Fix it, or set data.on_error: skip."
                )
            )
    if not found:
        on_bad(UserMistake(f"{file} contains no games. Remove it, or set data.on_error: skip."))


Reader = Callable[[Path, OnBad], Iterator[Record]]
_READERS: dict[str, Reader] = {"text": _read_text, "json": _read_json, "chess": _read_chess}
_FOLDER_SUFFIXES: dict[str, tuple[str, ...]] = {
    "json": (".json", ".jsonl", ".ndjson"),
    "chess": (".txt", ".uci", ".pgn"),
}


def check_source(source: str) -> None:
    """A UserMistake if there is no reader for this `data.source`."""
    if source not in _READERS:
        known = ", ".join(_READERS)
        raise UserMistake(f"data.source {source} is not supported. Supported sources: {known}.")


def folder_suffixes(source: str) -> tuple[str, ...] | None:
    """Which files of a folder this source reads; None: all."""
    return _FOLDER_SUFFIXES.get(source)
