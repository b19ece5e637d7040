"""JSON: one object per line, or an array of objects."""

import codecs
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from shoal.catalogue.data_files import uncompressed_suffix
from shoal.data.sources.compressed import open_data
from shoal.data.sources.record import OnBad, Record
from shoal.mistakes import UserMistake

_BLOCK = 1 << 20


def read_json(file: Path, on_bad: OnBad) -> Iterator[Record]:
    """`.json`: an array of objects (or concatenated objects). Any other suffix: one object per line. Both also
    compressed."""
    reader = _read_json_array if is_array(file) else _read_json_lines
    records = 0
    for record in reader(file, on_bad):
        records += 1
        yield record
    if records:
        return
    with open_data(file) as stream:
        blank = not stream.read(_BLOCK).strip(b"[] \t\r\n" + codecs.BOM_UTF8)
    if blank:
        on_bad(UserMistake(f"{file} is empty. Remove it, or set data.on_error: skip."))


def is_array(file: Path) -> bool:
    """Whether the file is read as a whole, not line by line."""
    return uncompressed_suffix(file.name) == ".json"


def _read_json_lines(file: Path, on_bad: OnBad) -> Iterator[Record]:
    read = 0
    with open_data(file) as stream:
        for number, line in enumerate(stream, start=1):
            read += len(line)
            if not line.strip():
                continue
            try:
                value = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except json.JSONDecodeError as error:
                on_bad(_not_json(file, number, _problem(error)))
            except UnicodeDecodeError as error:
                on_bad(_not_json(file, number, f"byte {error.start} of the line is not UTF-8"))
            except RecursionError:
                on_bad(_not_json(file, number, "nested too deeply"))
            except ValueError:
                on_bad(_not_json(file, number, _TOO_LONG))
            else:
                if isinstance(value, dict):
                    yield Record(value, file, number, read=read)
                else:
                    on_bad(_not_object(value, file, number))


_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER, _DECODER_OF_TEXT, _HUGE = json.JSONDecoder(), json.JSONDecoder(parse_int=str), object()
_TOO_LONG = f"an integer has more than {sys.get_int_max_str_digits()} digits"


def _read_json_array(file: Path, on_bad: OnBad) -> Iterator[Record]:
    # Element by element, so that each record has its line. After a syntax error the start of the next element is
    # unknown: it is raised whatever data.on_error says, because the rest would be lost silently.
    with open_data(file) as stream:
        data = stream.read()
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
            raise _not_json(file, error.lineno, _problem(error)) from error
        except RecursionError as error:
            raise _not_json(file, line, "nested too deeply") from error
        if value is _HUGE:
            on_bad(_not_json(file, line, _TOO_LONG, skippable=True))
        elif isinstance(value, dict):
            yield Record(value, file, line)
        else:
            on_bad(_not_object(value, file, line))
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


def _problem(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} at column {error.colno}"  # some messages end in "at"


def _skip_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _not_object(value: object, file: Path, line: int) -> UserMistake:
    problem = f"an object with named keys is needed, found a {type(value).__name__}"
    return _not_json(file, line, problem, skippable=True)


def _not_json(file: Path, line: int, problem: str, skippable: bool = False) -> UserMistake:
    skip = " or set data.on_error: skip" if skippable or not is_array(file) else ""
    return UserMistake(f"{file}:{line} is not a JSON record: {problem}. Fix the line{skip}.")
