"""Sources with columns: compressed files, csv, parquet, and `data.columns`."""

import csv
import gzip
import io
import re
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from shoal.config.schema import DataConfig
from shoal.data import load_tokenizer, prepare
from shoal.data.first_look import check_first_record
from shoal.data.sources import Reading, find_reading, read_records
from shoal.data.sources.find import find_files, find_source
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")


def zst(data: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(data)


def read(file: Path, source: str = "", columns: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    reading = Reading(source or find_source("auto", file), (file,), columns or {})
    return [record.fields for record in read_records(reading)]


def skipped(file: Path, columns: Mapping[str, str] | None = None) -> tuple[list[dict[str, Any]], list[str]]:
    """The records and the mistakes with data.on_error skip."""
    mistakes: list[str] = []
    reading = Reading(find_source("auto", file), (file,), columns or {})
    found = list(read_records(reading, lambda mistake: mistakes.append(str(mistake))))
    return [record.fields for record in found], mistakes


def refused(file: Path, columns: Mapping[str, str] | None = None) -> str:
    with pytest.raises(UserMistake) as caught:
        read(file, columns=columns)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Compression

TWO = b'{"text": "1"}\n{"text": "\xf0\x9f\x90\x9f"}\n'


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zst)])
def test_compressed_files_are_read_like_the_originals(write: Write, suffix: str, pack: Any) -> None:
    expected = [{"text": "1"}, {"text": "🐟"}]
    assert read(write(f"a.jsonl{suffix}", pack(TWO))) == expected
    assert read(write(f"a.NDJSON{suffix}", pack(TWO[:14]) + pack(TWO[14:]))) == expected  # several members or frames
    assert read(write(f"a.json{suffix}", pack(b'[{"text": "1"},\n{"text": "\xf0\x9f\x90\x9f"}]'))) == expected
    assert read(write(f"a.csv{suffix}", pack("text\n1\n🐟\n".encode()))) == expected
    assert read(write(f"a.txt{suffix}", pack(TWO))) == [{"text": TWO.decode()}]
    folder = write(f"folder/b.jsonl{suffix}", pack(TWO)).parent
    assert [file.name for file in find_reading(DataConfig(path=str(folder))).files] == [f"b.jsonl{suffix}"]


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zst)])
def test_a_mistake_in_a_compressed_file_names_its_line(write: Write, suffix: str, pack: Any) -> None:
    file = write(f"a.jsonl{suffix}", pack(b'{"text": "1"}\n{"text": \n{"text": "3"}\n'))
    assert refused(file).startswith(f"{file}:2 is not a JSON record: ")
    records, mistakes = skipped(file)
    assert records == [{"text": "1"}, {"text": "3"}]
    assert len(mistakes) == 1
    assert "is empty" in refused(write(f"empty.jsonl{suffix}", pack(b"")))
    assert re.search(
        r"bad\.txt\.\w+ is not UTF-8: the byte at offset 1 ", refused(write(f"bad.txt{suffix}", pack(b"a\xff")))
    )


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".zst", zst)])
@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.txt"])
def test_a_damaged_archive_is_one_sentence(write: Write, name: str, suffix: str, pack: Any) -> None:
    content = b"text\n" + b"".join(b"%d\n" % number for number in range(5000))
    whole = pack(b'{"text": "a"}\n' * 999 if name != "a.csv" else content)
    for broken in (whole[:-9], b"junk" + whole, whole[:20] + b"\0\0\0\0\0\0\0\0" + whole[28:]):
        file = write(name + suffix, broken)
        says = refused(file)
        assert says.startswith(f"{file} is a damaged or incomplete {suffix} archive (")
    if name == "a.txt":  # used completely or not at all
        assert skipped(file)[0] == []


def test_a_large_archive_is_not_held_in_memory(write: Write) -> None:
    lines = (b'{"text": "' + b"fish " * 2000 + b'"}\n') * 3000  # 30 MB
    for name, packed in (("a.jsonl.gz", gzip.compress(lines, 1)), ("a.jsonl.zst", zst(lines))):
        reading = Reading("json", (write(name, packed),))
        tracemalloc.start()
        count = sum(1 for _ in read_records(reading))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert count == 3000
        assert peak < len(lines) / 4


def test_a_missing_package_is_named(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    archive, table = write("a.jsonl.zst", zst(TWO)), write("a.parquet", b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert refused(archive).endswith("needs the package zstandard: pip install 'shoal[data]'.")
    assert refused(table).endswith("needs the package pyarrow: pip install 'shoal[data]'.")


# CSV


def test_csv_rows_are_records_with_the_names_of_the_header(write: Write) -> None:
    file = write("a.csv", b'\xef\xbb\xbfprompt,completion\r\n"a ""b"", c","two\nlines"\r\n\r\n\xc3\xa9,\r\n')
    records = list(read_records(Reading("csv", (file,))))
    assert [(record.line, record.fields) for record in records] == [
        (2, {"prompt": 'a "b", c', "completion": "two\nlines"}),
        (5, {"prompt": "é", "completion": ""}),
    ]
    assert read(write("a.tsv", "x\ty\n1,5\t2\n")) == [{"x": "1,5", "y": "2"}]


def test_a_cell_of_ten_megabytes_is_read(write: Write) -> None:
    long = ("fish " * 500 + 'and "chips",\n') * 4_200
    written = io.StringIO()
    csv.writer(written).writerows([["id", "text"], ["1", long]])
    (record,) = read(write("a.csv", written.getvalue()))
    assert record == {"id": "1", "text": long}


@pytest.mark.parametrize(
    ("content", "line", "problem"),
    [
        ("a,b\n1,2\n3\n5,6\n", 3, r"it has 1 fields, but the header has 2 \(a, b\)"),
        ("a,b\n1,2\n3,4,5\n5,6\n", 3, "it has 3 fields"),
        (b'a,b\n1,2\n3,"\xff\n"\n5,6\n', 3, "it is not UTF-8"),
        ('a,b\n1,2\n"3"x,4\n5,6\n', 3, r"',' expected after '\"'"),
    ],
)
def test_a_bad_row_names_its_line_and_can_be_skipped(write: Write, content: Any, line: int, problem: str) -> None:
    file = write("a.csv", content)
    assert re.match(rf"{file}:{line} is not a row of this table: {problem}.*on_error: skip\.$", refused(file))
    records, mistakes = skipped(file)
    assert records == [{"a": "1", "b": "2"}, {"a": "5", "b": "6"}]
    assert len(mistakes) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("a,b\n", "has a header and no rows"),
        ("a,b,a\n1,2,3\n", "names 'a' more than once"),
    ],
)
def test_a_file_without_a_table_is_a_mistake_that_can_be_skipped(write: Write, content: str, says: str) -> None:
    file = write("a.csv", content)
    assert says in refused(file)
    assert [len(found) for found in skipped(file)] == [0, 1]


def test_a_quote_without_an_end_is_never_skipped_since_it_swallows_the_rest(write: Write) -> None:
    file = write("a.csv", 'a,b\n1,2\n3,"4\n5,6\n')
    with pytest.raises(UserMistake, match=rf"{file}:3 .* does not end"):
        skipped(file)


# Parquet

CHAT = [{"messages": [{"role": "user", "content": f"{n}"}], "extra": None, "n": n} for n in range(600)]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("parquet") / "chats.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(CHAT), file, row_group_size=250)
    return file


def test_parquet_rows_arrive_as_python_values_with_their_numbers(chats: Path) -> None:
    records = list(read_records(Reading("parquet", (chats,))))
    assert [record.fields for record in records] == CHAT
    assert [record.line for record in records] == list(range(1, 601))


def test_a_parquet_file_that_is_damaged_or_empty_is_one_sentence(write: Write, chats: Path) -> None:
    whole = chats.read_bytes()
    middle = len(whole) // 3
    for broken in (whole[:-1], b"PAR1", b"text\n", b""):
        file = write("a.parquet", broken)
        assert refused(file).startswith(f"{file} cannot be read as Parquet (")
    file = write("b.parquet", whole[:middle] + bytes(100) + whole[middle + 100 :])
    assert refused(file).startswith(f"{file} cannot be read as Parquet")
    pyarrow.parquet.write_table(pyarrow.table({"text": pyarrow.array([], pyarrow.string())}), file)
    assert "has no rows" in refused(file)


# data.columns

QUESTION = {"question": "1 + 1", "answer": "2", "text": "unused"}


def test_columns_are_renamed_before_the_format_sees_them(write: Write) -> None:
    file = write("a.jsonl", [QUESTION])
    assert read(file, columns={"prompt": "question", "completion": "answer"}) == [
        {"prompt": "1 + 1", "completion": "2", "text": "unused"}
    ]
    assert read(file, columns={"text": "answer"}) == [{"question": "1 + 1", "text": "2"}]
    swapped = write("b.jsonl", [{"prompt": "a", "completion": "p"}])
    assert read(swapped, columns={"prompt": "completion", "completion": "prompt"}) == [
        {"prompt": "p", "completion": "a"}
    ]


def test_a_mapped_column_that_a_record_lacks_lists_those_there_are(write: Write) -> None:
    file = write("a.jsonl", [QUESTION, {"question": "?"}, QUESTION])
    columns = {"prompt": "question", "completion": "answer"}
    says = refused(file, columns)
    assert says.startswith(f"{file}:2 has no answer, which data.columns names; its columns are question. ")
    records, mistakes = skipped(file, columns)
    assert (len(records), len(mistakes)) == (2, 1)


def test_a_name_that_no_format_reads_is_a_mistake_before_anything_is_read(write: Write) -> None:
    data = DataConfig(path=str(write("a.jsonl", [QUESTION])), columns={"promt": "question"})
    with pytest.raises(UserMistake, match=r"data\.columns has promt.*one of text, .*Did you mean prompt"):
        check_first_record(data)


def test_mapped_columns_are_trained_on_and_are_part_of_the_cache_key(write: Write, settings: Any) -> None:
    file = str(write("a.csv", "first,second\nab,xy\n"))
    for name in ("first", "second"):
        data = settings(source="auto", path=file, columns={"text": name})
        check_first_record(data)
        tokens, _ = prepare(data, BYTES, report=lambda _: None)[0]
        assert tokens.tolist() == [*({"first": b"ab", "second": b"xy"}[name]), BYTES.end]


def test_a_null_in_a_table_names_its_row(write: Write, settings: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "b"]}), file)
    with pytest.raises(UserMistake, match=rf"{file}:2: text must be a string, found null"):
        prepare(settings(source="auto", path=file), BYTES, report=lambda _: None)
    sequences = prepare(settings(source="auto", path=file, on_error="skip"), BYTES, report=lambda _: None)
    assert (sequences.summary.documents, sequences.summary.skipped) == (2, 1)


# data.source: auto


@pytest.mark.parametrize(
    ("names", "source"),
    [
        (["a.JSONL"], "json"),
        (["a.json.zst", "README.md", "LICENSE.txt"], "json"),
        (["a.csv", "b.tsv.gz"], "csv"),
        (["train-0.csv", "train-test-mixed.csv"], "csv"),
        (["x/a.parquet", "x/b.parquet"], "parquet"),
        (["train.bin", "val.bin"], "tokens"),
        (["a.bin", "a.idx"], "tokens"),
        (["a.py", "b.md"], "text"),
        (["a.pgn.zst"], "chess"),
        (["state.json", "dataset_info.json", "data-00000-of-00001.arrow"], "hf"),
        (["dataset_dict.json", "train/state.json"], "hf"),
    ],
)
def test_the_source_is_told_by_the_names_of_the_files(
    write: Write, tmp_path: Path, names: list[str], source: str
) -> None:
    for name in names:
        write(f"folder/{name}", b"x")
    assert find_source("auto", tmp_path / "folder") == source
    if source != "hf" and len(names) == 1:
        assert find_source("auto", tmp_path / "folder" / names[0]) == source


def test_what_the_names_do_not_tell_is_one_sentence_that_lists_the_sources(write: Write, tmp_path: Path) -> None:
    known = "json, text, parquet, csv, hf, chess, tokens, cells"
    file = write("unknown/data.xyz", b"x")
    with pytest.raises(UserMistake, match=rf"^data\.path {file} does not tell .* one of {known}\.$"):
        find_source("auto", file)
    with pytest.raises(UserMistake, match=rf"^The folder {file.parent} holds no files that tell .* one of {known}\.$"):
        find_source("auto", file.parent)
    write("mixed/a.jsonl", b"x")
    write("mixed/a.csv", b"x")
    with pytest.raises(UserMistake, match=r"several kinds in .*mixed: csv, json\. Set data\.source to the kind to"):
        find_source("auto", tmp_path / "mixed")
    with pytest.raises(UserMistake, match=r"several kinds in data\.path: csv, json\. Give files of one kind, or set"):
        find_source("auto", [tmp_path / "mixed" / "a.jsonl", tmp_path / "mixed" / "a.csv"])
    with pytest.raises(UserMistake, match=r"holds no \.parquet files"):
        find_files("parquet", tmp_path / "mixed")


def test_a_folder_of_several_splits_is_not_read_as_one(write: Write, tmp_path: Path) -> None:
    for name in ("train-0.jsonl", "test-0.jsonl"):
        write(f"folder/{name}", [{"text": "a"}])
    with pytest.raises(UserMistake, match=r"several splits, such as train-0\.jsonl and test-0\.jsonl.*source: hf"):
        find_source("auto", tmp_path / "folder")
    assert find_source("auto", str(tmp_path / "folder" / "train*")) == "json"
