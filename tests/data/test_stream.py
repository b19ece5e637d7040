"""Streamed data: the same order for every reader, from every checkpoint, with bounded disk space."""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.config.schema import DataConfig
from shoal.data import load_tokenizer
from shoal.data.sequences import StoredSequences, open_sequences
from shoal.data.sets import Sets, prepare_sets
from shoal.data.stream import builder as stream_builder
from shoal.data.stream.folder import StreamFolder
from shoal.data.stream.stream import Stream
from shoal.mistakes import UserMistake

BYTES = load_tokenizer("bytes")


def write_files(folder: Path, sizes: list[int]) -> list[str]:
    """Files with so many records, each of which has a text of its own."""
    texts = []
    for number, size in enumerate(sizes):
        some = [f"{number}:{record}" for record in range(size)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in some))
        texts += some
    return texts


def open_sets(folder: Path, said: list[str] | None = None, **changes: Any) -> Sets:
    """A stream of the files of a folder, one record per sequence."""
    values: dict[str, Any] = {"path": str(folder / "*.jsonl"), "max_length": 64, "pack": False, "validation": 0}
    data = DataConfig(**{**values, "streaming": {"chunk": 4, "shuffle_buffer": 8}, **changes})
    report = (lambda sentence: None) if said is None else said.append
    return prepare_sets(data, BYTES, seed=7, cache=folder / "cache", report=report)


def read(sets: Sets, first: int, count: int) -> list[str]:
    """The texts at these positions."""
    texts = []
    for number in sets.order.training_sequences(first, count).tolist():
        tokens, _ = sets.training[number]
        assert tokens[-1] == BYTES.end
        texts.append(BYTES.decode(tokens[:-1]))
    return texts


@pytest.fixture
def _in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders that are threads of this process, which start at once."""

    def start(stream: Stream) -> None:
        job = stream._job
        folder = StreamFolder(job.folder)

        def build() -> None:
            # The test may end and delete the folder while the next chunk is made.
            with suppress(OSError, UserMistake), folder.only_builder() as alone:
                if alone:
                    stream_builder.build_chunks(job, lambda: True)

        thread = threading.Thread(target=build, daemon=True)
        thread.start()
        time.sleep(0.01)

    monkeypatch.setattr(stream_builder, "PAUSE", 0.001)
    monkeypatch.setattr("shoal.data.stream.stream.PAUSE", 0.001)
    monkeypatch.setattr(Stream, "_start_builder", start)


@pytest.mark.usefixtures("_in_threads")
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    chunk=st.integers(1, 6),
    buffer=st.integers(1, 14),
    resume_at=st.integers(0, 30),
    batches=st.lists(st.integers(1, 7), min_size=1, max_size=4),
)
@settings(max_examples=6, deadline=None)
def test_every_epoch_has_every_record_once_and_any_checkpoint_continues(
    sizes: list[int], chunk: int, buffer: int, resume_at: int, batches: list[int]
) -> None:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        texts = write_files(Path(name), sizes)
        streaming = {"chunk": chunk, "shuffle_buffer": buffer}
        first, second = (open_sets(Path(name), streaming=streaming) for _ in range(2))
        total = 2 * len(texts) + sum(batches)
        whole = read(first, 0, total)
        assert Counter(whole[: len(texts)]) == Counter(whole[len(texts) : 2 * len(texts)]) == Counter(texts)
        at = min(resume_at, total - sum(batches))
        second.order.restore(first.order.state(at), at)
        for size in batches:  # of any world size
            assert read(second, at, size) == whole[at : at + size]
            at += size
        first.close()
        second.close()


@pytest.mark.usefixtures("_in_threads")
def test_packed_text_and_mixtures_are_streamed_too(tmp_path: Path) -> None:
    texts = write_files(tmp_path, [9, 5])
    packed = open_sets(tmp_path, pack=True, max_length=16)
    assert all(len(packed.training[number][0]) <= 17 for number in packed.order.training_sequences(0, 20).tolist())
    packed.close()
    blocks = [{"path": str(tmp_path / "0.jsonl"), "weight": 1}, {"path": str(tmp_path / "1.jsonl"), "weight": 2}]
    first, second = (open_sets(tmp_path, path=None, source=blocks, mixing={"by": "examples"}) for _ in range(2))
    whole = read(first, 0, 60)
    assert Counter(text[0] for text in whole) == {"0": 20, "1": 40}
    assert set(whole) == set(texts)
    second.order.restore(first.order.state(33), 33)
    assert read(second, 33, 20) == whole[33:53]
    first.close()
    second.close()


@pytest.mark.usefixtures("_in_threads")
def test_another_stream_begins_where_a_run_from_a_checkpoint_continues(tmp_path: Path) -> None:
    write_files(tmp_path, [20])
    first, second = open_sets(tmp_path), open_sets(tmp_path)
    second.order.restore([], 100)
    assert read(second, 100, 8) == read(first, 0, 8)
    first.close()
    second.close()


@pytest.mark.usefixtures("_in_threads")
def test_a_run_from_a_checkpoint_with_another_batch_size_continues_at_the_next_example(tmp_path: Path) -> None:
    write_files(tmp_path, [40, 9])
    blocks = [{"path": str(tmp_path / f"{number}.jsonl")} for number in range(2)]
    for source in ({}, {"path": None, "source": blocks, "mixing": {"by": "examples"}}):
        first, smaller, larger = (open_sets(tmp_path, **source) for _ in range(3))
        following = read(first, 18, 24)
        for sets, at in ((smaller, 2), (larger, 64)):
            sets.order.restore(first.order.state(18), at)
            assert Counter(read(sets, at, 24)) == Counter(following)
            sets.close()
        first.close()


@pytest.mark.usefixtures("_in_threads")
def test_another_shuffle_buffer_is_another_order(tmp_path: Path) -> None:
    write_files(tmp_path, [20])
    first, second = open_sets(tmp_path), open_sets(tmp_path, streaming={"chunk": 4, "shuffle_buffer": 16})
    assert first.training.summary.content != second.training.summary.content
    first.close()
    second.close()


@pytest.mark.usefixtures("_in_threads")
def test_a_run_that_stopped_at_a_bad_record_goes_on_in_the_same_order_if_it_is_skipped(tmp_path: Path) -> None:
    write_files(tmp_path, [20])
    (tmp_path / "0.jsonl").open("a").write('{"text": null}\n{"text": "after"}\n')
    first, second = open_sets(tmp_path), open_sets(tmp_path, on_error="skip")
    assert first.training.summary.content == second.training.summary.content
    before = read(first, 0, 16)
    second.order.restore(first.order.state(6), 6)
    assert read(second, 6, 10) == before[6:]
    assert "after" in read(second, 16, 5)
    first.close()
    second.close()


@pytest.mark.usefixtures("_in_threads")
def test_files_of_the_same_name_and_size_are_different_streams(tmp_path: Path) -> None:
    opened = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.jsonl").write_text(json.dumps({"text": name}) + "\n")
        opened.append(open_sets(tmp_path, path=str(tmp_path / name / "0.jsonl")))
    assert [read(sets, 0, 2) for sets in opened] == [["a", "a"], ["b", "b"]]
    for sets in opened:
        sets.close()


@pytest.mark.usefixtures("_in_threads")
@pytest.mark.parametrize("nothing", ["", None])
def test_chunks_without_text_are_passed_over(tmp_path: Path, nothing: str | None) -> None:
    texts = ["a", "b", nothing, nothing, nothing, "c", nothing, nothing]
    (tmp_path / "0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    first, second = (
        open_sets(tmp_path, on_error="skip", streaming={"chunk": 2, "shuffle_buffer": 2}) for _ in range(2)
    )
    whole = read(first, 0, 12)
    for epoch in range(4):
        assert sorted(whole[3 * epoch : 3 * epoch + 3]) == ["a", "b", "c"]
    second.order.restore(first.order.state(5), 5)
    assert read(second, 5, 7) == whole[5:]
    first.close()
    second.close()


@pytest.mark.usefixtures("_in_threads")
def test_a_window_stays_open_for_a_thread_when_another_is_far_ahead(tmp_path: Path) -> None:
    write_files(tmp_path, [40])
    sets = open_sets(tmp_path)
    (stream,) = sets.streams
    window = stream.window_at(0)
    stream.window_at(39)
    assert window.parts is not None
    assert len(read(sets, 0, 40)) == 40  # a step with sequences of more windows than are kept open
    sets.close()


@pytest.mark.usefixtures("_in_threads")
def test_a_chunk_that_is_deleted_while_it_is_opened_is_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files(tmp_path, [40])
    sets = open_sets(tmp_path)
    expected = read(sets, 0, 20)
    sets.close()
    deleted: list[Path] = []

    def open_late(path: Path) -> StoredSequences:
        if path.exists() and path.name not in {one.name for one in deleted}:
            deleted.append(path)
            shutil.rmtree(path)
        return open_sequences(path)

    monkeypatch.setattr("shoal.data.stream.stream.open_sequences", open_late)
    again = open_sets(tmp_path)
    assert read(again, 0, 20) == expected
    assert deleted
    again.close()


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    write_files(tmp_path, [4])
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserMistake, match=r"cache/stream cannot be written\. Set SHOAL_CACHE"):
        open_sets(tmp_path)


@pytest.fixture
def streamed(tmp_path: Path) -> Iterator[Callable[..., Sets]]:
    """Opens streams with real builders, and closes them."""
    opened = []

    def open_one(**changes: Any) -> Sets:
        opened.append(open_sets(tmp_path, **changes))
        return opened[-1]

    yield open_one
    for sets in opened:
        sets.close()


def wait_until(condition: Callable[[], bool]) -> None:
    ends = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_a_builder_serves_all_readers_and_is_replaced_when_it_dies(
    tmp_path: Path, streamed: Callable[..., Sets]
) -> None:
    write_files(tmp_path, [40, 25])
    first, second = streamed(), streamed()
    (folder,) = (tmp_path / "cache" / "stream").iterdir()
    for step in range(10):
        assert read(first, 3 * step, 3) == read(second, 3 * step, 3)
    # Chunks that nobody needs are deleted, and not many are made ahead.
    wait_until(lambda: not (folder / "chunk-00000000").exists())
    assert len(list(folder.glob("chunk-*"))) <= 14
    builder = first.streams[0]._builder  # the other reader found it running
    assert builder is not None
    assert second.streams[0]._builder is None
    os.kill(builder.pid, signal.SIGKILL)
    builder.wait()
    assert read(second, 30, 60) == read(streamed(), 30, 60)


def test_the_folder_is_removed_when_nobody_reads_it(tmp_path: Path, streamed: Callable[..., Sets]) -> None:
    write_files(tmp_path, [9])
    sets = streamed()
    (folder,) = (tmp_path / "cache" / "stream").iterdir()
    sets.stand_by()
    assert folder.exists()
    sets.close()
    wait_until(lambda: not folder.exists())


def test_a_broken_record_ends_every_reader_with_its_place(tmp_path: Path) -> None:
    write_files(tmp_path, [9])
    (tmp_path / "0.jsonl").open("a").write('{"text": \n')
    sets = open_sets(tmp_path)
    with pytest.raises(UserMistake, match=r"0\.jsonl:10 is not a JSON record"):
        read(sets, 0, 30)
    sets.close()


@pytest.mark.usefixtures("_in_threads")
def test_skipped_records_are_counted(tmp_path: Path) -> None:
    write_files(tmp_path, [9])
    (tmp_path / "0.jsonl").open("a").write('{"text": \n')
    said: list[str] = []
    sets = open_sets(tmp_path, said, on_error="skip")
    assert len(set(read(sets, 0, 9))) == 9
    assert any("1 invalid records" in sentence and "0.jsonl:10" in sentence for sentence in said)
    sets.close()


@pytest.mark.usefixtures("_in_threads")
def test_skipped_records_are_not_reported_for_every_chunk(tmp_path: Path) -> None:
    lines = [line for number in range(40) for line in (json.dumps({"text": str(number)}), "{")]
    (tmp_path / "0.jsonl").write_text("\n".join(lines))
    said: list[str] = []
    sets = open_sets(tmp_path, said, on_error="skip")
    assert len(read(sets, 0, 40)) == 40
    assert len([sentence for sentence in said if "were skipped" in sentence]) == 2
    sets.close()
