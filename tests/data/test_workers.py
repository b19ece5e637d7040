"""Tokenization by several processes gives what one gives, and ends cleanly whatever happens to them."""

import multiprocessing
import os
import signal
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal.data import StoredSequences, load_tokenizer, prepare, rewrite, tokenize, workers
from shoal.data.sources import text
from shoal.data.tokenizer import ByteTokenizer
from shoal.mistakes import RunFailed, UserMistake
from tests.harness import POOLED

Write = Callable[[str, Any], Path]
BYTES = load_tokenizer("bytes")
TEST = os.getpid()


def live_workers() -> list[Any]:
    """The processes that this one has started, without the ranks that other tests use again."""
    return [one for one in multiprocessing.active_children() if one.name != POOLED]


def quiet(sentence: str) -> None:
    pass


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Pretend that there are so many cores, and that a little text is worth worker processes."""
    monkeypatch.setattr(tokenize, "WORTH_WORKERS", 1)
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 400)

    def pretend(number: int) -> None:
        monkeypatch.setattr(workers, "available_cores", lambda: number)

    return pretend


def records(count: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(1)
    return [{"text": "".join(map(chr, random.integers(97, 600, random.integers(0, 90))))} for _ in range(count)]


def same(one: StoredSequences, other: StoredSequences) -> bool:
    arrays = ("tokens", "flags", "starts", "ends", "counted")
    return one.summary == other.summary and all(
        np.array_equal(getattr(one, name), getattr(other, name)) for name in arrays
    )


@pytest.mark.parametrize("number", [2, 5])
def test_the_number_of_processes_changes_nothing(
    write: Write, settings: Any, cores: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    lines = [*records(200), {"other": 1}, *records(30), {"text": 5}, {"text": ""}]
    files = {"json": write("a.jsonl", lines), "text": write("a.txt", "naïve words\n" * 500)}
    with files["json"].open("a") as file:
        file.write("not json\n")
    monkeypatch.setattr(text, "CHUNK", 700)
    for source, path in files.items():
        data = settings(source=source, path=path, on_error="skip")
        cores(1)
        alone = prepare(data, BYTES, cache=tmp_path / "alone", report=quiet)
        cores(number)
        together = prepare(data, Elsewhere(), cache=tmp_path / "together", report=quiet)
        assert same(alone, together)
    assert (live_workers(), together.summary.skipped) == ([], 0)


class Elsewhere(ByteTokenizer):
    """Refuses to encode in the process of the test."""

    def encode_many(self, texts: Any) -> Any:
        assert os.getpid() != TEST
        return super().encode_many(texts)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_mistakes_are_counted_and_raised_in_the_order_of_the_records(
    write: Write, settings: Any, cores: Any, number: int, skip: bool
) -> None:
    # The mistake in formatting line 41 is found by a worker, after the reader found the one in line 42.
    file = write("a.jsonl", [*records(40), {"other": 1}])
    with file.open("a") as stream:
        stream.write("not json\n" + '{"text": 5}\n' + '{"text": "more"}\n' * 3)
    cores(number)
    if skip:
        summary = prepare(settings(source="json", path=file, on_error="skip"), BYTES, report=quiet).summary
        assert summary.skipped == 3
        assert summary.first_skipped is not None
        assert summary.first_skipped.startswith(f"{file}:41 lacks text")
    else:
        with pytest.raises(UserMistake, match=r"a\.jsonl:41 lacks text"):
            prepare(settings(source="json", path=file), BYTES, report=quiet)
    assert live_workers() == []


class Killed(ByteTokenizer):
    """Its worker dies as if the system had run out of memory."""

    def encode_many(self, texts: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


class Interrupts(ByteTokenizer):
    """Ctrl-C while a worker computes."""

    def encode_many(self, texts: Any) -> Any:
        with suppress(FileExistsError):  # one of the workers
            (Path(os.environ["SHOAL_CACHE"]) / "interrupted").mkdir()
            os.kill(TEST, signal.SIGINT)
        time.sleep(60)


class Broken(ByteTokenizer):
    def encode_many(self, texts: Any) -> Any:
        raise ZeroDivisionError("a bug")


@pytest.mark.parametrize(
    ("tokenizer", "error", "says"),
    [
        (Killed(), RunFailed, r"^A process that tokenizes the data was killed by SIGKILL; .*\.$"),
        (Interrupts(), KeyboardInterrupt, None),
        (Broken(), ZeroDivisionError, "a bug"),
    ],
    ids=["killed", "interrupted", "broken"],
)
def test_a_preparation_that_ends_early_leaves_no_process_and_no_file(
    write: Write, settings: Any, cores: Any, cache: Path, tokenizer: Any, error: type[BaseException], says: str | None
) -> None:
    cores(2)
    # A shell starts its background jobs with SIGINT ignored, and these tests may run in one.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(error, match=says):
            prepare(settings(source="json", path=write("a.jsonl", records(100))), tokenizer, report=quiet)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert live_workers() == []
    assert [entry.suffix for entry in (cache / "data").iterdir()] == [".lock"]


class Waits(ByteTokenizer):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def encode_many(self, texts: Any) -> Any:
        (self.folder / str(os.getpid())).touch()
        time.sleep(0.02)
        return super().encode_many(texts)


def test_workers_end_when_their_parent_is_killed(write: Write, settings: Any, cores: Any, tmp_path: Path) -> None:
    cores(2)
    data = settings(source="json", path=write("a.jsonl", records(1000)))
    pids = tmp_path / "pids"
    pids.mkdir()
    parent = multiprocessing.get_context("fork").Process(
        target=prepare, args=(data, Waits(pids)), kwargs={"report": quiet}
    )
    parent.start()
    _until(lambda: len(list(pids.iterdir())) == 2)
    parent.kill()
    parent.join()
    _until(lambda: not any(_runs(int(pid.name)) for pid in pids.iterdir()))


def _until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def test_a_daemonic_process_tokenizes_alone(write: Write, settings: Any, cores: Any, tmp_path: Path) -> None:
    cores(2)
    data = settings(source="json", path=write("a.jsonl", records(20)))
    daemon = multiprocessing.get_context("fork").Process(
        target=prepare, args=(data, Waits(tmp_path)), kwargs={"report": quiet}, daemon=True
    )
    daemon.start()
    daemon.join(20)
    assert daemon.exitcode == 0
    assert (tmp_path / str(daemon.pid)).exists()


def test_a_bounded_number_of_items_is_read_ahead() -> None:
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    results: list[str] = []
    for result in workers.map_in_order(str, items(), 3, lambda: None):
        results.append(result)
        assert taken <= len(results) + 4 * 3
    assert results == [str(number) for number in range(100)]


def test_a_long_item_does_not_keep_the_other_workers_waiting(tmp_path: Path) -> None:
    def work(number: int) -> int:
        if number == 0:
            _until((tmp_path / "6").exists)
        (tmp_path / str(number)).touch()
        return number

    assert list(workers.map_in_order(work, range(20), 2, lambda: None)) == list(range(20))


def test_work_is_done_outside_of_the_main_thread_whose_memory_is_slow_after_a_fork() -> None:
    def in_main_thread(number: int) -> bool:
        return threading.current_thread() is threading.main_thread()

    assert list(workers.map_in_order(in_main_thread, range(4), 2, lambda: None)) == [False] * 4


@pytest.mark.parametrize("work", [lambda number: lambda: number, sys.exit], ids=["cannot be sent", "exits"])
def test_a_worker_that_cannot_answer_is_an_error(work: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RunFailed, match="ended unexpectedly, with status 1"):
        list(workers.map_in_order(work, range(4), 2, lambda: None))
    assert live_workers() == []
    assert "Traceback" in capfd.readouterr().err


def test_memory_does_not_grow_with_the_data(write: Write, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write("a.jsonl", [{"instruction": "Repeat.", "output": "0123456789" * 900}] * 400)
    data = settings(source="json", path=file, max_length=10_000)
    monkeypatch.setattr(workers, "available_cores", lambda: 1)  # measured is this process
    monkeypatch.setattr(tokenize, "WORTH_WORKERS", 1)
    monkeypatch.setattr(tokenize, "_CHARACTERS_AT_ONCE", 1 << 16)
    monkeypatch.setattr(rewrite, "_TOKENS_AT_ONCE", 1 << 16)
    tracemalloc.start()
    try:
        sequences = prepare(data, BYTES, report=quiet)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sequences.tokens.nbytes + sequences.flags.nbytes > 10 << 20
    assert peak < 5 << 20


def test_little_text_is_tokenized_in_this_process(write: Write, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "available_cores", lambda: 8)
    monkeypatch.setattr(workers, "map_in_order", None)
    prepare(settings(source="json", path=write("a.jsonl", records(100))), BYTES, report=quiet)


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, 8),
        ({"cpu.max": "150000 100000"}, 2),
        ({"cpu.max": "max 100000"}, 8),
        ({"cpu.max": "10000 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
    ],
)
def test_a_container_may_have_fewer_cores_than_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limits: dict[str, str], cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)))
    (tmp_path / "cpu").mkdir()
    for name, limit in limits.items():
        (tmp_path / name).write_text(limit)
    assert workers.available_cores(tmp_path) == cores
