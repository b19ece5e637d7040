"""The process that tokenizes streamed data ahead of training.

A process of its own, because tokenizing in the one that trains would take turns with it. It ends when nobody reads the
stream any more.
"""

import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from shoal.data.cache import build_folder, unusable_cache
from shoal.data.cells.source import SLAB, CellTokenizer
from shoal.data.cells.write import write_cells
from shoal.data.formats.choose import Options
from shoal.data.order import key_of, permute
from shoal.data.progress import Progress
from shoal.data.settings import Settings
from shoal.data.sources import Reading, Record, read_records
from shoal.data.sources.find import PATH
from shoal.data.stream.folder import ALL, NEXT, Cursor, StreamFolder, Want
from shoal.data.tokenize import Errors, NothingToLearn
from shoal.data.tokenizer_base import Tokenizer
from shoal.data.write import name_files, write_sequences
from shoal.mistakes import UserMistake

PAUSE = 0.05  # seconds between two looks at what is needed
LINGER = 60.0  # seconds without readers: ranks that are started again find their chunks


@dataclass(frozen=True)
class StreamJob:
    """What the builder is given by the process that starts it."""

    folder: Path
    settings: Settings
    reading: Reading
    tokenizer: Tokenizer
    options: Options
    not_apart: str | None
    seed: int
    chunk: int  # records
    ahead: int  # chunks
    cells: CellTokenizer | None = None  # for cells, which are no records


class RecordStream:
    """The records of all files, epoch by epoch, from a cursor on."""

    def __init__(self, job: StreamJob, cursor: Cursor, errors: Errors | None = None) -> None:
        self._job = job
        self.cursor = cursor
        self.errors = errors or Errors(job.settings.on_error == "skip")
        self._records = self._read(cursor)
        self._following = next(self._records, None)

    @property
    def ended(self) -> bool:
        """Whether the epoch is over."""
        return self._following is None

    def take(self, count: int) -> Iterator[Record]:
        """The next `count` records, or those that are left in the epoch. Moves the cursor along."""
        for left in range(count - 1, -1, -1):
            if self._following is None:
                break
            record, self.cursor = self._following
            self._following = next(self._records, None)
            last = left == 0 or self._following is None
            # A document that is longer than a chunk goes on as another one in the next.
            yield replace(record, continued=record.continued and not last)
        if self._following is None:
            self.cursor = Cursor(self.cursor.epoch + 1)

    def write(self, path: Path) -> None:
        """Write the next chunk into the folder `path`."""
        job = self._job
        write_sequences(
            path,
            job.settings,
            self.take(job.chunk),
            job.tokenizer,
            options=job.options,
            errors=self.errors,
            report=lambda sentence: None,
            where=name_files(job.reading.files),
            key=PATH,
            not_apart=job.not_apart,
        )

    def _read(self, start: Cursor) -> Iterator[tuple[Record, Cursor]]:
        """Records, and the cursor after each."""
        # A dataset of several files in one folder is read as a whole.
        whole = self._job.reading
        readings = [whole] if whole.root is not None else [replace(whole, files=(file,)) for file in whole.files]
        order = permute(np.arange(len(readings)), len(readings), key_of("shoal", "files", self._job.seed, start.epoch))
        for place in range(start.file, len(readings)):
            skipped = start.record if place == start.file else 0
            records = read_records(readings[int(order[place])], self.errors)
            if skipped:
                next(islice(records, skipped - 1, None), None)
                self.errors.unread.clear()  # those before the cursor belong to other chunks
            for number, record in enumerate(records, start=skipped + 1):
                yield record, Cursor(start.epoch, place, number)


class CellStream:
    """The same of cells, which are read in slabs: a cursor counts cells."""

    def __init__(self, job: StreamJob, cursor: Cursor) -> None:
        assert job.cells is not None
        self._job, self._work, self.cursor = job, job.cells, cursor
        self.errors = Errors(skip=False)
        self._cells = [one.cells for one in self._work.cells.files]
        count = len(self._cells)
        self._order = permute(np.arange(count), count, key_of("shoal", "files", job.seed, cursor.epoch)).tolist()
        self.ended = False

    def write(self, path: Path) -> None:
        """Write the next chunk, or what is left in the epoch, into the folder `path`. Moves the cursor along."""
        ranges, left = [], self._job.chunk
        place, first = self.cursor.file, self.cursor.record
        while left and place < len(self._order):
            number = self._order[place]
            last = min(first + left, self._cells[number])
            ranges += [(number, at, min(at + SLAB, last)) for at in range(first, last, SLAB)]
            left -= last - first
            place, first = (place, last) if last < self._cells[number] else (place + 1, 0)
        self.ended = place == len(self._order)
        self.cursor = Cursor(self.cursor.epoch + 1) if self.ended else Cursor(self.cursor.epoch, place, first)
        write_cells(
            path,
            self._work,
            ranges,
            key=PATH,
            progress=Progress(lambda sentence: None),
        )


def open_at(job: StreamJob, cursor: Cursor, errors: Errors | None = None) -> RecordStream | CellStream:
    return RecordStream(job, cursor, errors) if job.cells is None else CellStream(job, cursor)


def build_chunks(job: StreamJob, starter_is_gone: Callable[[], bool]) -> None:
    """Build the chunks that readers need and some ahead of them, until there are no readers."""
    folder = StreamFolder(job.folder)
    stream: RecordStream | CellStream | None = None
    last_seen = time.monotonic()
    while True:
        wants = folder.wants()
        if wants is not None:
            last_seen = time.monotonic()
        elif starter_is_gone() or time.monotonic() - last_seen > LINGER:
            return
        if wants:
            folder.delete_before(min(want.low for want in wants))
        missing = next_missing(folder, wants or [], job.ahead)
        if missing is None:
            time.sleep(PAUSE)
            continue
        number, cursor = missing
        if stream is None or stream.ended or stream.cursor != cursor:
            stream = open_at(job, cursor)
        stream = build_chunk(job, folder, number, stream)


def next_missing(folder: StreamFolder, wants: Sequence[Want], ahead: int) -> tuple[int, Cursor] | None:
    """The first chunk that some reader needs and that does not exist, and where it begins."""
    for distance in range(ahead + 1):
        for want in wants:
            number, cursor = want.next, want.cursor
            while number < want.next + distance and folder.chunk(number).exists():
                number, cursor = number + 1, folder.next_cursor(number)
            if not folder.chunk(number).exists():
                return number, cursor
    return None


def build_chunk(
    job: StreamJob, folder: StreamFolder, number: int, stream: RecordStream | CellStream
) -> RecordStream | CellStream:
    """Write a chunk, which appears when it is complete. Records without anything to learn are passed over. Returns the
    stream after it."""
    begin = stream.cursor

    def build(path: Path) -> None:
        nonlocal stream
        while True:
            try:
                stream.write(path)
                break
            except NothingToLearn:
                if stream.cursor.epoch > begin.epoch + 1 or (stream.ended and begin == Cursor(begin.epoch)):
                    raise  # in a whole epoch
                if stream.ended:
                    stream = open_at(job, stream.cursor, stream.errors)
        (path / NEXT).write_text(json.dumps(asdict(stream.cursor)))
        stream.errors.count, stream.errors.first = 0, None  # each chunk has its own

    build_folder(folder.chunk(number), build, durable=False)
    return stream


def main(pipe: int) -> None:
    """Build what the process at the other end of `pipe` sends. When that process dies, the pipe is closed."""
    # Slurm signals every process of a job, in sessions of their own too: the ranks still need data for their step.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    starter = Connection(pipe)
    job = starter.recv()
    assert isinstance(job, StreamJob)
    folder = StreamFolder(job.folder)
    with folder.only_builder() as alone:
        if not alone:
            return
        folder.report_failure(None)
        folder.delete_before(ALL)  # chunks are not synced to disk: those of a builder that died may be incomplete
        try:
            build_chunks(job, starter.poll)
        except UserMistake as mistake:
            folder.report_failure(str(mistake))
        except OSError as error:
            folder.report_failure(str(unusable_cache(job.folder.parent, error)))
        else:
            folder.delete()  # nobody reads it
