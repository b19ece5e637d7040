"""Prepared data is found again by the content of its files, which are hashed once."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.data import content, load_tokenizer, prepare
from shoal.data.content import hash_contents, read_states
from shoal.data.progress import Progress
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")


def quiet(sentence: str) -> None:
    pass


def digest(files: list[Path], folder: Path) -> str:
    return hash_contents(read_states(files), folder, Progress(quiet))


def test_data_that_was_touched_copied_or_moved_is_not_prepared_again(
    write: Write, settings: Any, said: list[str], tmp_path: Path
) -> None:
    folder = write("data/a.txt", "hello there").parent
    write("data/b.txt", "and more")
    first = prepare(settings(path=folder), BYTES, report=quiet)
    os.utime(folder / "a.txt", ns=(1, 1))
    shutil.copytree(folder, tmp_path / "copied")
    for path in (folder, tmp_path / "copied", folder.rename(tmp_path / "moved")):
        if path.exists():
            assert prepare(settings(path=path), BYTES, report=said.append).summary == first.summary
            assert "Using cached" in said[-1]
    for changed in ({"a.txt": "hello THERE"}, {"a.txt": "and more", "b.txt": "hello there"}):  # also the order
        for name, text in changed.items():
            (tmp_path / "moved" / name).write_text(text)
        found = prepare(settings(path=tmp_path / "moved"), BYTES, report=said.append)
        assert "Using cached" not in said[-1]
        assert found.summary.content != first.summary.content


def test_a_file_is_hashed_once_unless_it_changed_a_moment_ago(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, memory = [write("a.txt", "one"), write("b.txt", "two")], tmp_path / "hashes"
    first = digest(files, memory)
    assert not memory.exists()  # a write within the resolution of the clock would go unnoticed
    now = time.time_ns()
    monkeypatch.setattr(content.time, "time_ns", lambda: now + 10**10)
    assert digest(files, memory) == first
    hashing = content._hash
    monkeypatch.setattr(content, "_hash", None)
    assert digest(files, memory) == first
    monkeypatch.setattr(content, "_hash", hashing)
    (remembered,) = memory.iterdir()
    remembered.write_text(first[:10])  # of a process that was killed
    assert digest(files, memory) == first
    state = files[0].stat()
    files[0].write_text("ONE")
    os.utime(files[0], ns=(state.st_atime_ns, state.st_mtime_ns))
    assert digest(files, memory) != first  # although its size and time of modification are the same


def test_where_contents_begin_and_how_they_are_read_is_part_of_the_hash(write: Write, tmp_path: Path) -> None:
    different = [
        [("a.txt", "ab"), ("b.txt", "c")],
        [("a.txt", "a"), ("b.txt", "bc")],
        [("a.json", "ab"), ("b.txt", "c")],
    ]
    found = {digest([write(name, text) for name, text in one], tmp_path / "hashes") for one in different}
    assert len(found) == 3


def test_a_later_start_with_many_files_is_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = tmp_path / "shard"
    shard.mkdir()
    files = [shard / f"{number}.txt" for number in range(2_000)]
    (tmp_path / "text").write_text("text")
    for file in files:
        os.link(tmp_path / "text", file)
    now = time.time_ns()
    monkeypatch.setattr(content.time, "time_ns", lambda: now + 10**10)
    first = digest(files, tmp_path / "hashes")
    began = time.process_time()
    assert digest(files, tmp_path / "hashes") == first
    assert time.process_time() - began < 0.2  # a second for ten thousand


def test_a_file_that_cannot_be_read_is_one_sentence(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    states = read_states([file := write("a.txt", "one")])
    file.unlink()
    with pytest.raises(UserMistake, match=r"a\.txt cannot be read \(No such file"):
        hash_contents(states, Path("nowhere"), Progress(quiet))
    with pytest.raises(UserMistake, match=r"a\.txt cannot be read: No such file"):
        read_states([file])
