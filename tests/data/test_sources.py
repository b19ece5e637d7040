from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.data.sources import Reading, read_records, text
from shoal.data.sources.find import find_files
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]


def texts(path: object) -> list[str]:
    return [record.fields["text"] for record in read_records(Reading("text", tuple(find_files("text", path))))]


def test_a_folder_is_read_in_sorted_order_without_hidden_files(write: Write, tmp_path: Path) -> None:
    for name in ("b.txt", "a/2.md", "a/1.txt", ".hidden", ".git/config"):
        write(f"corpus/{name}", name)
    assert texts(tmp_path / "corpus") == ["a/1.txt", "a/2.md", "b.txt"]


def test_a_list_of_files_folders_and_globs_reads_each_file_once(write: Write, tmp_path: Path) -> None:
    for name in ("x/1.txt", "x/2.txt", "y.txt"):
        write(name, name)
    found = [str(tmp_path / "y.txt"), str(tmp_path / "**/*.txt"), str(tmp_path / "x")]
    assert texts(found) == ["y.txt", "x/1.txt", "x/2.txt"]


def test_text_keeps_its_line_ends_and_drops_a_byte_order_mark(write: Write) -> None:
    assert texts(write("a.txt", b"\xef\xbb\xbfone\r\ntwo\r")) == ["one\r\ntwo\r"]


@pytest.mark.parametrize("size", [4, 5, 7, 16, 1000])
def test_a_large_file_comes_in_chunks_that_join_to_the_original(
    write: Write, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(text, "CHUNK", size)
    whole = "ab\ncdé 🐟🐟🐟 long line without an end " * 3 + "\n\nlast"
    records = list(read_records(Reading("text", (write("a.txt", whole),))))
    assert "".join(record.fields["text"] for record in records) == whole
    assert [record.continued for record in records] == [True] * (len(records) - 1) + [False]
    assert (len(records) > 1) == (size < 1000)


@pytest.mark.parametrize("size", [4, 7, 1000])
def test_undecodable_text_names_file_and_offset(write: Write, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(text, "CHUNK", size)
    file = write("bad.txt", "ünicode".encode() + b"\xff tail")
    with pytest.raises(UserMistake, match=rf"{file}.*offset 8"):
        list(read_records(Reading("text", (file,))))
    cut = write("cut.txt", "fish 🐟".encode()[:-1])
    with pytest.raises(UserMistake, match=rf"{cut}.*offset 5"):
        list(read_records(Reading("text", (cut,))))


def test_json_arrays_and_lines_know_their_lines(write: Write) -> None:
    array = write("a.json", '[\n {"text": "1"},\n\n {"text":\n "2"}, {"text": "3"}]\n')
    lines = write("a.jsonl", b'\xef\xbb\xbf{"text": "1"}\r\n\r\n{"text": "\\u00e9"}')
    assert [(record.line, record.fields["text"]) for record in read_records(Reading("json", (array,)))] == [
        (2, "1"),
        (4, "2"),
        (5, "3"),
    ]
    assert [(record.where, record.fields["text"]) for record in read_records(Reading("json", (lines,)))] == [
        (f"{lines}:1", "1"),
        (f"{lines}:3", "é"),
    ]


def test_objects_one_after_another_in_a_json_file_are_records(write: Write) -> None:
    records = read_records(Reading("json", (write("a.json", '{"text": "1"}\n{"text":\n "2"}\n'),)))
    assert [(record.line, record.fields["text"]) for record in records] == [(1, "1"), (2, "2")]


@pytest.mark.parametrize(
    ("name", "content", "line", "problem"),
    [
        ("a.jsonl", '{"text": "1"}\n{"text": \n', 2, "column"),
        ("a.jsonl", '{"text": "1"}\n[1, 2]\n', 2, "found a list"),
        ("a.jsonl", b'{"text": "1"}\n{"text": "\xff"}\n', 2, "not UTF-8"),
        ("a.jsonl", "[" * 100_000, 1, "nested too deeply|column"),
        ("a.json", '[{"text": "1"},\n{"text": }]', 2, "column"),
        ("a.json", '[{"text": "1"}\n{"text": "2"}]', 2, "comma is missing"),
        ("a.json", '[{"text": "1"},\n]', 2, "comma before"),
        ("a.json", '[{"text": "1"},\n{"text": "2"}\n', 3, "ends inside"),
        ("a.json", '[{"text": "1"}]\n {}', 1, "more after"),
        ("a.json", '[{"text": "1"},\n 7]', 2, "found a int"),
        ("a.json", b'[{"text": "1"},\n "\xff"]', 2, "not UTF-8"),
    ],
)
def test_json_mistakes_name_file_and_line(write: Write, name: str, content: Any, line: int, problem: str) -> None:
    file = write(name, content)
    with pytest.raises(UserMistake, match=rf"{file}:{line} .*({problem})"):
        list(read_records(Reading("json", (file,))))


@pytest.mark.parametrize(("source", "name", "content"), [("text", "a.txt", ""), ("json", "a.json", " []\n")])
def test_an_empty_file_is_a_mistake(write: Write, source: str, name: str, content: str) -> None:
    with pytest.raises(UserMistake, match=r"is empty.*Remove it"):
        list(read_records(Reading(source, (write(name, content),))))


def test_paths_that_lead_nowhere_say_so(write: Write, tmp_path: Path) -> None:
    write("corpus/alpaca.txt", "x")
    with pytest.raises(UserMistake, match=r"does not exist.*Did you mean alpaca\.txt"):
        find_files("text", tmp_path / "corpus/alpacca.txt")
    with pytest.raises(UserMistake, match="No file matches"):
        find_files("text", str(tmp_path / "*.parquet"))
    with pytest.raises(UserMistake, match=r"holds no \.json or"):
        find_files("json", tmp_path / "corpus")
    with pytest.raises(UserMistake, match=r"data\.path is not set"):
        find_files("text", None)
    with pytest.raises(UserMistake, match=r"data\.source images.*json, text, parquet"):
        find_files("images", tmp_path / "corpus")
