import errno
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import Sequences, load_tokenizer, prepare, prepare_sets, progress, tokenize
from shoal.data.formats.choose import alpaca_prompt
from shoal.data.sequences import DOCUMENT, LOSS_TOKEN, ArrayWriter
from shoal.data.sources import text
from shoal.mistakes import UserMistake

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")
END = BYTES.end


def quiet(sentence: str) -> None:
    pass


def contents(sequences: Sequences) -> list[list[int]]:
    return [sequences[index][0].tolist() for index in range(len(sequences))]


def joined(parts: list[list[int]]) -> list[int]:
    return list(chain.from_iterable(parts))


def labels(sequences: Sequences) -> list[list[int]]:
    """The loss tokens of each sequence."""
    found = (sequences[index] for index in range(len(sequences)))
    return [tokens[1:][flags[1:] & LOSS_TOKEN != 0].tolist() for tokens, flags in found]


def alpaca_records(count: int, seed: int = 0) -> list[dict[str, str]]:
    random = np.random.default_rng(seed)
    return [
        {"instruction": f"Say {number}.", "output": f"{number} " * int(random.integers(1, 30))}
        for number in range(count)
    ]


def only_entry(cache: Path) -> Path:
    (entry,) = [entry for entry in (cache / "data").iterdir() if entry.is_dir()]
    return entry


# What sequences hold


def test_a_stream_is_every_document_with_its_end_token_split_without_loss(
    write: Write, settings: Any, tmp_path: Path
) -> None:
    documents = ["first text\r\n", "zwei 🐟", "the third document is a good deal longer than a row"]
    for number, document in enumerate(documents):
        write(f"corpus/{number}.txt", document)
    sequences = prepare(settings(path=tmp_path / "corpus", max_length=8), BYTES, report=quiet)
    stream = [token for document in documents for token in [*document.encode(), END]]
    expected = [stream[start : start + 9] for start in range(0, len(stream) - 1, 8)]
    assert contents(sequences) == expected
    assert sequences.tokens.dtype == np.uint16
    assert not sequences.separate
    # The first token of each document is an input and never a loss token.
    begins = np.cumsum([0, *(len(document.encode()) + 1 for document in documents[:-1])])
    assert np.flatnonzero(sequences.flags & DOCUMENT).tolist() == begins.tolist()
    assert joined(labels(sequences)) == [token for index, token in enumerate(stream) if index not in begins]
    assert sequences.counted.tolist() == [len(one) for one in labels(sequences)]
    assert sequences.summary.documents == 3
    assert sequences.summary.tokens == len(stream)
    assert sequences.summary.longest == 8


@pytest.mark.parametrize(("chunk", "at_once"), [(5, 3), (7, 1000), (1 << 20, 1)])
def test_the_stream_does_not_depend_on_how_it_was_read(
    write: Write, settings: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, chunk: int, at_once: int
) -> None:
    for number in range(4):
        write(f"corpus/{number}.txt", f"document {number} 🐟\n" * (number + 1))
    data = settings(path=tmp_path / "corpus")
    expected = prepare(data, BYTES, cache=tmp_path / "one", report=quiet)
    monkeypatch.setattr(text, "CHUNK", chunk)
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", at_once)
    found = prepare(data, BYTES, cache=tmp_path / "two", report=quiet)
    assert contents(found) == contents(expected)
    assert found.flags.tolist() == expected.flags.tolist()
    assert found.summary == expected.summary


def test_unpacked_text_is_split_into_sequences_that_keep_every_label(write: Write, settings: Any) -> None:
    file = write("a.jsonl", [{"text": "abcdefghij"}, {"text": ""}, {"text": "xyz"}])
    sequences = prepare(settings(source="json", path=file, pack=False, max_length=4), BYTES, report=quiet)
    text = [*b"abcdefghij", END]
    assert contents(sequences) == [text[0:5], text[4:9], text[8:11], [*b"xyz", END]]
    assert joined(labels(sequences)) == [*text[1:], *b"yz", END]
    assert sequences.summary.empty == 1
    assert sequences.summary.truncated == 0


@pytest.mark.parametrize("pack", [True, False])
def test_the_loss_counts_only_the_answer_and_its_end_token(write: Write, settings: Any, pack: bool) -> None:
    file = write("a.json", [{"instruction": "Add.", "input": "1 + 1", "output": "2"}])
    sequences = prepare(settings(source="json", path=file, pack=pack, max_length=300), BYTES, report=quiet)
    assert contents(sequences) == [[*alpaca_prompt("Add.", "1 + 1").encode(), *b"2", END]]
    assert labels(sequences) == [[*b"2", END]]
    assert sequences.summary.format == "alpaca"
    everything = prepare(
        settings(source="json", path=file, pack=pack, max_length=300, train_on="all"), BYTES, report=quiet
    )
    assert labels(everything) == [contents(sequences)[0][1:]]


def test_packing_keeps_documents_whole_and_loses_or_repeats_none(write: Write, settings: Any) -> None:
    documents = alpaca_records(60)
    file = write("a.jsonl", documents)
    sequences = prepare(settings(source="json", path=file, max_length=399), BYTES, report=quiet)
    assert sequences.separate
    found = []
    for index in range(len(sequences)):
        tokens, flags = sequences[index]
        assert len(tokens) <= 400
        assert flags[0] == DOCUMENT
        found += [part.tolist() for part in np.split(tokens, np.flatnonzero(flags & DOCUMENT)[1:])]
    expected = [[*(alpaca_prompt(one["instruction"]) + one["output"]).encode(), END] for one in documents]
    assert sorted(found) == sorted(expected)
    assert sequences.counted.tolist() == [len(one) for one in labels(sequences)]
    assert sorted(joined(labels(sequences))) == sorted(
        token for one in documents for token in [*one["output"].encode(), END]
    )


def test_documents_truncated_before_their_answer_are_left_out_and_counted(
    write: Write, settings: Any, said: list[str]
) -> None:
    short, long = {"instruction": "Hi", "output": "yes " * 90}, {"instruction": "Hi " * 200, "output": "no"}
    file = write("a.json", [short, long])
    sequences = prepare(settings(source="json", path=file, max_length=200), BYTES, report=said.append)
    assert contents(sequences) == [[*(alpaca_prompt("Hi") + short["output"]).encode()][:201]]
    assert (sequences.summary.truncated, sequences.summary.dropped, sequences.summary.sequences) == (2, 1, 1)
    assert any("were truncated" in sentence for sentence in said)
    assert any("no loss tokens" in sentence for sentence in said)


def test_a_tokenizer_that_prepends_begin_gets_it_before_each_document(write: Write, settings: Any) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.prepends_begin = True
    file = write("a.jsonl", [{"text": "ab"}, {"text": "c"}])
    sequences = prepare(settings(source="json", path=file), tokenizer, report=quiet)
    assert contents(sequences) == [[256, *b"ab", END, 256, *b"c", END]]
    assert labels(sequences) == [[*b"ab", END, *b"c", END]]


def test_a_large_vocabulary_is_stored_in_four_bytes(write: Write, settings: Any) -> None:
    tokenizer = load_tokenizer("bytes")
    tokenizer.size = 70_000
    tokenizer.end = 69_999
    sequences = prepare(settings(path=write("a.txt", "ab")), tokenizer, report=quiet)
    assert sequences.tokens.dtype == np.int32
    assert contents(sequences) == [[*b"ab", 69_999]]


def test_invalid_records_are_skipped_and_counted_only_when_asked(write: Write, settings: Any, said: list[str]) -> None:
    file = write("a.jsonl", '{"text": "ab"}\n{"text": \n{"other": 1}\n{"text": "c"}\n')
    with pytest.raises(UserMistake, match=f"{file}:2"):
        prepare(settings(source="json", path=file), BYTES, report=quiet)
    sequences = prepare(settings(source="json", path=file, on_error="skip"), BYTES, report=said.append)
    assert contents(sequences) == [[*b"ab", END, *b"c", END]]
    assert sequences.summary.skipped == 2
    assert any("2 invalid records" in sentence and f"{file}:2" in sentence for sentence in said)


def test_a_long_preparation_reports_progress(
    write: Write, settings: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 100_000, 3))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(tokenize, "_RECORDS_AT_ONCE", 1)
    file = write("a.jsonl", [{"instruction": "abc", "output": "d"}] * 4)
    prepare(settings(source="json", path=file, max_length=200), BYTES, report=said.append)
    # One tick of the clock, of three seconds, per record: a quarter of the file each.
    assert said[1] == "Tokenizing: 1 examples (0.3/s), 9 s left."
    assert "Packing: 4 documents (1.3/s), 0 s left." in said


def test_rates_and_times_are_short() -> None:
    assert [progress.shorten(rate) for rate in (0.31, 42.4, 8_437.0, 1_234_567.0)] == [
        "0.3",
        "42",
        "8,440",
        "1,230,000",
    ]
    assert [progress.duration(seconds) for seconds in (31, 700, 12_000)] == ["31 s", "12 min", "3 h 20 min"]


def test_the_rate_of_a_download_has_its_unit(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0, 0, 10))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    progress.Progress(said.append).tick("Downloading", 26, "MB", 0.5)
    assert said == ["Downloading: 26 MB (2.6 MB/s), 10 s left."]


# Validation


def test_validation_is_a_share_or_a_path_or_nothing(write: Write, settings: Any) -> None:
    file, other = write("a.txt", "abc" * 100), write("other.txt", "xyz" * 20)
    share = prepare_sets(settings(path=file, validation=0.1), BYTES, seed=1, report=quiet)
    assert share.validation is share.training
    assert len(share.order.validation_sequences()) == np.ceil(len(share.training) * 0.1)
    path = prepare_sets(settings(path=file, validation=str(other)), BYTES, seed=1, report=quiet)
    assert path.validation is not None
    assert path.order.validation_sequences().tolist() == list(range(len(path.validation)))
    assert path.order.training_count == len(path.training)
    assert {*joined(contents(path.validation))} == {*b"xyz", END}
    none = prepare_sets(settings(path=file, validation=0), BYTES, seed=1, report=quiet)
    assert none.validation is None
    assert none.order.validation_sequences().tolist() == []


# Mistakes


def test_data_without_loss_tokens_is_a_mistake(write: Write, settings: Any) -> None:
    with pytest.raises(UserMistake, match="no text"):
        prepare(settings(source="json", path=write("a.jsonl", [{"text": ""}])), BYTES, report=quiet)
    with pytest.raises(UserMistake, match=r"no record.*skipped: 1.*is empty"):
        prepare(settings(path=write("a.txt", ""), on_error="skip"), BYTES, report=quiet)
    file = write("b.json", [{"instruction": "x" * 400, "output": "y"}])
    with pytest.raises(UserMistake, match=r"None of the 1 documents.*data\.max_length 50\. Raise it"):
        prepare(settings(source="json", path=file, max_length=50), BYTES, report=quiet)


def test_a_failed_preparation_leaves_nothing_behind(write: Write, settings: Any, cache: Path) -> None:
    file = write("a.jsonl", '{"text": "ab"}\nnot json\n')
    with pytest.raises(UserMistake):
        prepare(settings(source="json", path=file), BYTES, report=quiet)
    assert [entry.suffix for entry in (cache / "data").iterdir()] == [".lock"]


def test_a_cache_that_cannot_be_written_says_what_to_do(write: Write, settings: Any) -> None:
    file = write("a.txt", "ab")
    with pytest.raises(UserMistake, match=r"cannot be written.*SHOAL_CACHE"):
        prepare(settings(path=file), BYTES, cache=file, report=quiet)


@pytest.mark.parametrize(
    ("number", "says"),
    [(errno.EIO, r"cannot be used \(Input/output error\)"), (errno.EDQUOT, "is on a full disk")],
    ids=["error", "quota"],
)
def test_a_disk_that_fails_is_one_sentence(
    number: int, says: str, write: Write, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(ArrayWriter, "append", fail)
    with pytest.raises(UserMistake, match=rf"{says}.*SHOAL_CACHE"):
        prepare(settings(path=write("a.txt", "ab")), BYTES, report=quiet)


def test_a_full_disk_says_what_to_do_and_leaves_nothing_behind(
    write: Write, settings: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_to_a_full_disk(self: ArrayWriter, values: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArrayWriter, "append", write_to_a_full_disk)
    with pytest.raises(UserMistake, match=r"full disk.*SHOAL_CACHE"):
        prepare(settings(path=write("a.txt", "ab")), BYTES, report=quiet)
    assert [entry.suffix for entry in (cache / "data").iterdir()] == [".lock"]


def test_data_that_changes_while_it_is_read_is_not_cached(
    write: Write, settings: Any, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write("a.txt", "ab")
    encode = type(BYTES).encode_many

    def encode_while_growing(self: Any, texts: Any) -> Any:
        file.write_text("abc")
        return encode(self, texts)

    monkeypatch.setattr(type(BYTES), "encode_many", encode_while_growing)
    with pytest.raises(UserMistake, match="changed while it was read"):
        prepare(settings(path=file), BYTES, report=quiet)
    assert not [entry for entry in (cache / "data").iterdir() if entry.is_dir()]


# The cache


def test_the_second_preparation_reads_no_source(
    write: Write, settings: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = settings(path=write("a.txt", "hello there"))
    first = prepare(data, BYTES, report=quiet)
    monkeypatch.setattr(sys.modules["shoal.data.prepare"], "read_records", None)
    second = prepare(data, BYTES, report=said.append)
    assert contents(second) == contents(first)
    assert isinstance(second.tokens.base, np.memmap)
    assert "Using cached tokenized data" in said[-1]


def test_whatever_changes_the_sequences_prepares_them_again(write: Write, settings: Any, cache: Path) -> None:
    file = write("a.jsonl", [{"instruction": "a", "output": "b"}])
    base = {"source": "json", "path": file, "max_length": 300}
    other = load_tokenizer("bytes")
    other.__class__ = type("Other", (type(other),), {"fingerprint": "other"})

    def entries(**changes: Any) -> int:
        prepare(settings(**(base | changes)), changes.pop("tokenizer", BYTES), report=quiet)
        return len([entry for entry in (cache / "data").iterdir() if entry.is_dir()])

    assert entries() == 1
    assert entries(workers=7, validation=0.5) == 1
    assert [entries(max_length=299), entries(pack=False), entries(train_on="all"), entries(on_error="skip")] == [
        2,
        3,
        4,
        5,
    ]
    prepare(settings(**base), other, report=quiet)
    write("a.jsonl", [{"instruction": "a", "output": "longer"}])
    assert entries() == 7
    assert [entries(long_documents="split"), entries(document_mask=True)] == [8, 9]


def _truncate(entry: Path) -> None:
    file = entry / "tokens.npy"
    file.write_bytes(file.read_bytes()[:-3])


def _flip(entry: Path) -> None:
    data = bytearray((entry / "flags.npy").read_bytes())
    data[-1] ^= 1
    (entry / "flags.npy").write_bytes(data)


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "a truncated file": _truncate,
    "a flipped bit": _flip,
    "a missing file": lambda entry: (entry / "ends.npy").unlink(),
    "no list of contents": lambda entry: (entry / "contents.json").unlink(),
    "a broken list of contents": lambda entry: (entry / "contents.json").write_text("[1"),
    "a list of contents nested too deep": lambda entry: (entry / "contents.json").write_text("[" * 100_000),
    "a file that is not listed": lambda entry: (entry / "contents.json").write_text(
        json.dumps({"flags.npy": json.loads((entry / "contents.json").read_text())["flags.npy"]})
    ),
    "a file in its entry": lambda entry: (shutil.rmtree(entry), entry.write_text("?")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_rebuilt(write: Write, settings: Any, cache: Path, said: list[str], damage: str) -> None:
    data = settings(path=write("a.txt", "hello there"))
    first = contents(prepare(data, BYTES, report=quiet))
    DAMAGES[damage](only_entry(cache))
    assert contents(prepare(data, BYTES, report=said.append)) == first
    assert "damaged" in said[0]
    assert contents(prepare(data, BYTES, report=said.append)) == first
    assert "Using cached tokenized data" in said[-1]


def test_leftovers_of_a_killed_process_are_removed(write: Write, settings: Any, cache: Path) -> None:
    data = settings(path=write("a.txt", "hello there"))
    prepare(data, BYTES, report=quiet)
    entry = only_entry(cache)
    left = entry.rename(entry.with_name(f"{entry.name}.new-99999"))
    (left / "contents.json").unlink()
    prepare(data, BYTES, report=quiet)
    assert only_entry(cache) == entry


def _prepare_slowly(data: Any, out: Path) -> None:
    class Slow(type(BYTES)):  # type: ignore[misc]
        def encode_many(self, texts: Any) -> Any:
            with (out / "built").open("a") as log:
                log.write("x")
            time.sleep(0.3)
            return super().encode_many(texts)

    sequences = prepare(data, Slow(), report=quiet)
    (out / f"{os.getpid()}.json").write_text(json.dumps(contents(sequences)))


def test_of_several_processes_one_prepares_and_the_others_wait(write: Write, settings: Any, tmp_path: Path) -> None:
    data = settings(path=write("a.txt", "hello there"))
    out = tmp_path / "out"
    out.mkdir()
    processes = [
        multiprocessing.get_context("fork").Process(target=_prepare_slowly, args=(data, out)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
        assert process.exitcode == 0
    assert (out / "built").read_text() == "x"
    results = [json.loads(file.read_text()) for file in out.glob("*.json")]
    assert len(results) == 4
    assert all(result == results[0] for result in results)


def test_documents_packed_for_one_model_are_refused_for_another_that_cannot_keep_them_apart(write, settings):
    data = settings(source="json", path=write("a.json", alpaca_records(20)), pack=True, max_length=300)
    assert prepare(data, BYTES, report=quiet).separate
    with pytest.raises(UserMistake, match=r"^data.pack is true, but it cannot; set data.pack: false"):
        prepare(data, BYTES, report=quiet, not_apart="it cannot")
