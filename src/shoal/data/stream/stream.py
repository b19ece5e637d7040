"""Streamed data: sequences and their order while a builder process tokenizes ahead of training.

The stream is cut into chunks of records, each tokenized and packed by itself, and into windows of several chunks, whose
sequences are shuffled together. No window crosses an epoch. Windows follow each other in the global order, so which
sequence is at a position depends on the data and the seed alone, and a checkpoint needs to keep only where a window
begins.
"""

import hashlib
import json
import multiprocessing
import subprocess
import sys
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from shoal.config.schema import DataConfig, StreamingConfig
from shoal.data.cache import Report, unusable_cache
from shoal.data.cells.source import find_cell_tokenizer
from shoal.data.cells.write import FORMAT
from shoal.data.content import read_states
from shoal.data.formats.choose import choose_format
from shoal.data.order import Order, StreamState, key_of, permute
from shoal.data.prepare import LAYOUT, notes, options_of, reading_of, settings_of, template_of
from shoal.data.sequences import Sequences, StoredSequences, Summary, open_sequences
from shoal.data.sources import read_records
from shoal.data.stream.builder import StreamJob
from shoal.data.stream.folder import Cursor, StreamFolder, Want
from shoal.data.tokenize import Errors
from shoal.data.tokenizer_base import Tokenizer
from shoal.mistakes import UserMistake
from shoal.paths import cache_root

PAUSE = 0.02  # seconds between two looks whether a chunk is there
OPEN_WINDOWS = 2  # besides the newest: steps are prefetched, and their micro-batches made in several threads


@dataclass
class Window:
    """Chunks whose sequences are shuffled together. `parts` is None while they are not open."""

    position: int  # of its first sequence
    chunk: int  # its first
    cursor: Cursor  # where that begins
    ends: np.ndarray  # the number of sequences in its chunks up to each
    after: Cursor  # where the chunk after it begins
    parts: list[StoredSequences] | None

    @property
    def size(self) -> int:
        return int(self.ends[-1])

    @property
    def next_chunk(self) -> int:
        return self.chunk + len(self.ends)


def open_stream(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seed: int,
    cache: Path | None,
    report: Report,
    not_apart: str | None,
    objective: str = "causal_lm",
) -> "Stream":
    """The stream of `data`, whose first chunk exists."""
    wanted = data.streaming if isinstance(data.streaming, StreamingConfig) else StreamingConfig()
    reading = reading_of(data, None, cache_root(cache), report)
    template, files = template_of(data, tokenizer), reading.files
    settings = settings_of(data, reading, template, not_apart, objective)
    cells = None
    if reading.source == "cells":
        cells = find_cell_tokenizer(data, files, tokenizer, settings)
        settings = replace(settings, format=FORMAT)
    if settings.format == "auto":  # one format for all chunks
        first = next(read_records(reading, Errors(skip=settings.on_error == "skip")), None)
        if first is not None:
            settings = replace(settings, format=choose_format("auto", first, objective).name)
    chunks_per_window = -(-wanted.shuffle_buffer // wanted.chunk)
    described = [tokenizer.fingerprint, content_of(files), seed, wanted.chunk, LAYOUT]
    if cells is not None:
        described.append(data.cells.model_dump(mode="json"))
    job = StreamJob(
        # Other files may have the same names and sizes: who shares chunks has to read the very same files.
        folder=cache_root(cache) / "stream" / _key_of([*described, settings.as_key(), read_states(files)]),
        settings=settings,
        reading=reading,
        tokenizer=tokenizer,
        options=options_of(settings, template),
        not_apart=not_apart,
        seed=seed,
        chunk=wanted.chunk,
        ahead=chunks_per_window,
        cells=cells,
    )
    report(
        f"Streaming {len(files):,} file{'s' if len(files) > 1 else ''} ({settings.format}): chunks of {wanted.chunk:,} "
        f"{'records' if cells is None else 'cells'}, shuffled among {chunks_per_window * wanted.chunk:,}."
    )
    # A run that stopped at a bad record had no other before: it goes on in the same order if that is skipped.
    content = _key_of([*described, replace(settings, on_error="").as_key(), chunks_per_window])
    try:
        stream = Stream(job, content, chunks_per_window=chunks_per_window, report=report)
    except OSError as error:
        raise unusable_cache(job.folder.parent, error) from error
    for sentence in notes(data, stream.summary, tokenizer, not_apart):
        report(sentence)
    return stream


def _key_of(described: list[object]) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:32]


def content_of(files: Sequence[Path]) -> list[tuple[str, int]]:
    """What tells one set of streamed files from another. Their contents are not read: there may be too much."""
    return [(file.name, file.stat().st_size) for file in files]


class Stream:
    """The windows that this process has read, and those it reads next. Threads may share it."""

    def __init__(self, job: StreamJob, content: str, *, chunks_per_window: int, report: Report) -> None:
        self._job = job
        self._chunks_per_window = chunks_per_window
        self._report = report
        self._folder = StreamFolder(job.folder)
        self._reader = self._folder.reader()
        self._builder: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._lock = threading.RLock()
        self._start = (0, 0, Cursor())  # position, chunk and cursor of the first window
        self._windows: list[Window] = []
        self._counted = -1  # the last chunk whose skipped records are among `_skipped`
        self._skipped, self._worth_saying = 0, 1
        first = self._open_chunk(0, Cursor(), low=0)[0]
        # Statistics of the first chunk stand for the stream's.
        self.summary = replace(first.summary, content=content, longest=job.settings.max_length)

    def window_at(self, position: int) -> Window:
        """The window that holds a global position, with its parts open."""
        with self._lock:
            window = self._find(position)
            if window.parts is None:  # training was rolled back, or a step has sequences of many windows
                window.parts = self._open_parts(window.chunk, window.cursor, len(window.ends))[0]
            return replace(window)  # its parts stay open for the caller, also when another thread is far ahead

    def _find(self, position: int) -> Window:
        if position < self._start[0]:
            raise ValueError(f"position {position} is before the start of the stream at {self._start[0]}")
        while not self._windows or position >= self._windows[-1].position + self._windows[-1].size:
            self._windows.append(self._next_window())
            for old in self._windows[: -1 - OPEN_WINDOWS]:
                old.parts = None
            newest = self._windows[-1]
            self._reader.ask(Want(self._low(newest.chunk), newest.next_chunk, newest.after))
        return self._windows[bisect_right(self._windows, position, key=lambda one: one.position) - 1]

    def state(self, position: int) -> dict[str, int]:
        """Where the window that holds a position begins, and that position, for `restore`."""
        with self._lock:
            window = self._find(position)
        cursor = window.cursor
        return {
            "at": position,
            "position": window.position,
            "chunk": window.chunk,
            "epoch": cursor.epoch,
            "file": cursor.file,
            "record": cursor.record,
        }

    def restore(self, state: dict[str, int], position: int) -> None:
        """Continue at `position` with the sequence that followed when the state was taken, which was at another
        position if the global batch was another. Positions before its window are not available any more."""
        first = state["position"] + position - state["at"]
        with self._lock:
            if any((window.position, window.chunk) == (first, state["chunk"]) for window in self._windows):
                return
            cursor = Cursor(state["epoch"], state["file"], state["record"])
            self._start, self._windows = (first, state["chunk"], cursor), []

    def stand_by(self) -> None:
        """Need no chunk any more, but keep the builder for others of this run."""
        self._reader.ask(None)

    def close(self) -> None:
        self._reader.close()
        if self._pipe is not None:
            self._pipe.close()

    def _next_window(self) -> Window:
        position, chunk, cursor = self._start
        if self._windows:
            last = self._windows[-1]
            position, chunk, cursor = last.position + last.size, last.next_chunk, last.after
        parts, after = self._open_parts(chunk, cursor, self._chunks_per_window)
        return Window(position, chunk, cursor, np.cumsum([len(part) for part in parts]), after, parts)

    def _open_parts(self, chunk: int, cursor: Cursor, count: int) -> tuple[list[StoredSequences], Cursor]:
        """Up to `count` chunks from `chunk` on: fewer where an epoch ends."""
        low = self._low(chunk)
        parts: list[StoredSequences] = []
        epoch = cursor.epoch
        while len(parts) < count and cursor.epoch == epoch:
            part, cursor = self._open_chunk(chunk + len(parts), cursor, low)
            parts.append(part)
        return parts, cursor

    def _low(self, chunk: int) -> int:
        """The first chunk that is still needed, if `chunk` is."""
        return min([chunk, *(window.chunk for window in self._windows if window.parts is not None)])

    def _open_chunk(self, number: int, cursor: Cursor, low: int) -> tuple[StoredSequences, Cursor]:
        self._reader.ask(Want(low, number, cursor))
        path, started = self._folder.chunk(number), False
        while (found := self._read_chunk(path, number)) is None:
            status = None if self._builder is None else self._builder.poll()
            if status:
                raise RuntimeError(f"the process that tokenizes the stream ended with status {status}")
            if (self._builder is None or status == 0) and not self._folder.has_builder():
                if started and (failure := self._folder.failure()) is not None:
                    raise UserMistake(failure)
                self._start_builder()
                started = True
            time.sleep(PAUSE)
        opened, after = found
        self._reader.ask(Want(low, number + 1, after))  # the next one is built while this one is used
        self._report_skipped(number, opened.summary)
        return opened, after

    def _report_skipped(self, number: int, summary: Summary) -> None:
        """Say what was skipped: the first time, and whenever there is ten times as much, not for every chunk."""
        if number <= self._counted:  # opened before
            return
        self._counted = number
        self._skipped += summary.skipped
        if summary.skipped and self._skipped >= self._worth_saying:
            self._worth_saying = 10 * self._skipped
            self._report(
                f"{self._skipped:,} invalid records or files were skipped so far; one of them: {summary.first_skipped}"
            )

    def _read_chunk(self, path: Path, number: int) -> tuple[StoredSequences, Cursor] | None:
        """A chunk and where the next one begins; None if it does not exist, or is being deleted: then the builder had
        not read yet what this reader needs."""
        try:
            return open_sequences(path), self._folder.next_cursor(number)
        except FileNotFoundError:
            return None

    def _start_builder(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()  # stays open: the builder ends when it is closed
        with theirs:
            self._builder = subprocess.Popen(
                [sys.executable, "-c", f"from shoal.data.stream.builder import main; main({theirs.fileno()})"],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,  # a signal to the run is for its ranks: they finish their step
            )
        self._pipe.send(self._job)


class StreamSequences(Sequences):
    """The sequences of a stream. Their numbers count from its beginning."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self.summary = stream.summary

    def __len__(self) -> int:
        raise TypeError("a stream has no length")

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        ((part, local, _),) = self._parts(np.array([index]))
        return part[int(local[0])]

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        return self._each(indices, lambda part, local: part.lengths(local))

    def loss_tokens(self, indices: np.ndarray) -> np.ndarray:
        return self._each(indices, lambda part, local: part.loss_tokens(local))

    def values(self, index: int) -> np.ndarray | None:
        ((part, local, _),) = self._parts(np.array([index]))
        return part.values(int(local[0]))

    def _each(self, indices: np.ndarray, count: Callable[[Sequences, np.ndarray], np.ndarray]) -> np.ndarray:
        found = np.empty(indices.size, dtype=np.int64)
        for part, local, here in self._parts(indices.reshape(-1)):
            found[here] = count(part, local)
        return found.reshape(indices.shape)

    def _parts(self, indices: np.ndarray) -> Iterator[tuple[Sequences, np.ndarray, np.ndarray]]:
        """Each chunk that has some of these sequences, which it has, and where they are among `indices`."""
        left = np.arange(len(indices))
        while len(left):
            window = self._stream.window_at(int(indices[left[0]]))
            assert window.parts is not None
            local = indices[left] - window.position
            inside = (local >= 0) & (local < window.size)
            number = np.searchsorted(window.ends, local, side="right")
            for part, (sequences, end) in enumerate(zip(window.parts, window.ends, strict=True)):
                here = inside & (number == part)
                if here.any():
                    yield sequences, local[here] - (end - len(sequences)), left[here]
            left = left[~inside]


class StreamOrder(Order):
    """The order of a stream: its windows one after another, each shuffled."""

    def __init__(self, stream: Stream, seed: int, separate: int | None) -> None:
        self._stream = stream
        self._seed = seed
        self.sequences = self.training_count = None
        self.validation_count = separate or 0

    def sequences_at(self, first_position: int, count: int) -> np.ndarray:
        parts = [np.empty(0, dtype=np.int64)]
        position, stop = first_position, first_position + count
        while position < stop:
            window = self._stream.window_at(position)
            taken = min(stop, window.position + window.size) - position
            inside = np.arange(position - window.position, position - window.position + taken)
            parts.append(
                window.position + permute(inside, window.size, key_of("shoal", "window", self._seed, window.chunk))
            )
            position += taken
        return np.concatenate(parts)

    def validation_sequences(self) -> np.ndarray:
        return np.arange(self.validation_count)

    def state(self, position: int) -> StreamState:
        return [self._stream.state(position)]

    def restore(self, state: StreamState, position: int) -> None:
        begin = {"at": position, "position": position, "chunk": 0, "epoch": 0, "file": 0, "record": 0}
        self._stream.restore(state[0] if state else begin, position)
