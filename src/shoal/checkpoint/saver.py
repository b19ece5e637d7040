"""Saves checkpoints from all ranks, asynchronously or synchronously.

In an asynchronous save, training waits only for the copy to host memory. A background thread writes the files, and the
threads of all ranks agree on the outcome over a process group of their own. One save is in progress at a time; the next
one waits for it.
"""

import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.checkpoint import store
from shoal.checkpoint.gather import gather
from shoal.checkpoint.layout import Part, snapshot_of
from shoal.checkpoint.snapshot import HostCopy, Snapshot, write_snapshot
from shoal.parallel.ranks import Ranks

# The destination is full: space may be freed later. Any other error is taken to be permanent.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
NOT_AN_OS_ERROR = 100_000  # not a valid errno: an exception other than OSError was raised


@dataclass(frozen=True)
class Destination:
    """A folder for checkpoints, and a function that creates it."""

    checkpoints: Path
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Saved:
    """The outcome of a save, the same on every rank."""

    step: int
    folder: Path | None  # the complete checkpoint; None: it could not be saved anywhere
    problems: tuple[tuple[Path, int], ...]  # destinations where it failed, each with its errno
    seconds: float  # spent writing

    @property
    def unwritable(self) -> bool:
        """Whether the run's own folder failed for another reason than lack of space."""
        return bool(self.problems) and self.problems[0][1] not in NO_SPACE

    def explain(self) -> str:
        return "; ".join(f"{folder}: {os.strerror(number)}" for folder, number in self.problems)


class Saver:
    """Saves to the first of `destinations` that can be written."""

    def __init__(
        self,
        destinations: Sequence[Destination],
        ranks: Ranks,
        *,
        in_background: bool = True,
        full: bool = False,
        tidy: Callable[[Path, int], object] = lambda checkpoints, step: None,
        while_waiting: Callable[[], None] = lambda: None,
        patience: float = math.inf,
    ) -> None:
        self.destinations = destinations
        self.ranks = ranks
        self.in_background = in_background
        self.full = full
        self.tidy = tidy
        self.while_waiting = while_waiting  # called regularly while training waits for a save
        self.patience = patience  # seconds without progress on this rank after which it is no longer called
        self.waited = 0.0  # seconds that training was blocked by saves
        self._group: Ranks | None = None  # created at the first save: many processes never save
        self._copy = HostCopy(ranks.device)
        self._written = 0
        self._thread: threading.Thread | None = None
        self._ended: Saved | None = None
        self._crash: BaseException | None = None

    def save(
        self, step: int, parts: Mapping[str, Part], texts: Mapping[str, str], metrics: dict[str, float]
    ) -> Saved | None:
        """Save this rank's `parts` and, on rank 0, `texts` (file name → contents).

        Returns the outcome of the previous save, if it has not been returned yet. Without `in_background` this save is
        complete on return, and `settle` returns its outcome.
        """
        previous = self.settle()
        began = time.perf_counter()
        self._group = self._group or self.ranks.separate_group()
        if self.full:
            parts = gather(parts, self.ranks, self.while_waiting)
        snapshot = snapshot_of(parts) if parts else None
        # Gathered tensors are already copies.
        gathered = self.full and self.ranks.world_size > 1
        copied = self.in_background and not gathered
        if copied and snapshot is not None:
            try:
                self._copy.take(snapshot)
            except (RuntimeError, MemoryError):  # no memory for a copy: write it synchronously
                copied, self._copy = False, HostCopy(self.ranks.device)
        work = _Work(step, snapshot, self._copy if copied else None, texts, metrics)
        self._thread = threading.Thread(target=self._run, args=(work,), name="shoal-save", daemon=True)
        self._thread.start()
        self.waited += time.perf_counter() - began
        if not (copied or (gathered and self.in_background)):
            self._wait()
        return previous

    def settle(self) -> Saved | None:
        """Wait for the save in progress. Each outcome is returned once."""
        self._wait()
        return self._take()

    def poll(self) -> Saved | None:
        """Like `settle`, but without waiting: None while a save is in progress. Ranks may see it at different steps."""
        return None if self._thread is not None and self._thread.is_alive() else self.settle()

    def _wait(self) -> None:
        if self._thread is None:
            return
        began = last_progress = time.perf_counter()
        seen = self._written
        while self._thread.is_alive():
            self._thread.join(1)
            if self._written != seen:
                seen, last_progress = self._written, time.perf_counter()
            if time.perf_counter() - last_progress < self.patience:
                self.while_waiting()
        self.waited += time.perf_counter() - began
        self._thread = None
        if self._crash is not None:
            raise self._crash

    def _take(self) -> Saved | None:
        ended, self._ended = self._ended, None
        return ended

    def _run(self, work: "_Work") -> None:
        began = time.perf_counter()
        if self.ranks.device.type == "cuda":  # a new thread's current device is cuda:0, which belongs to another rank
            torch.cuda.set_device(self.ranks.device)
        problems: list[tuple[Path, int]] = []
        folder: Path | None = None
        try:
            for destination in self.destinations:
                number = self._save_in(destination, work)
                if number == NOT_AN_OS_ERROR:
                    break
                if number == 0:
                    folder = store.folder_for(destination.checkpoints, work.step)
                    break
                problems.append((destination.checkpoints, number))
        except BaseException as error:  # the collective itself failed: another rank is gone
            self._crash = error
        self._ended = Saved(work.step, folder, tuple(problems), time.perf_counter() - began)

    def _save_in(self, destination: Destination, work: "_Work") -> int:
        """Return 0 on every rank if the checkpoint is complete there, otherwise the errno of the failure."""
        number = self._agree(lambda: self._begin(destination, work.step) if self.ranks.first else None)
        if number == 0:
            number = self._agree(lambda: self._write(destination, work))
        if number == 0:
            number = self._agree(lambda: self._finish(destination, work) if self.ranks.first else None)
        if number and self.ranks.first:
            shutil.rmtree(store.folder_for(destination.checkpoints, work.step), ignore_errors=True)
        return number

    def _agree(self, act: Callable[[], object]) -> int:
        """Call `act` and all-reduce the outcome: the largest errno of all ranks, or 0."""
        number = 0
        try:
            act()
        except OSError as error:
            number = error.errno or errno.EIO
        except BaseException as error:
            self._crash, number = error, NOT_AN_OS_ERROR
        assert self._group is not None
        return int(self._group.largest(number))

    def _begin(self, destination: Destination, step: int) -> None:
        destination.prepare()
        store.begin(destination.checkpoints, step)

    def _write(self, destination: Destination, work: "_Work") -> None:
        """Write this rank's files, and their sizes and hashes for the manifest."""
        folder, rank, files = store.folder_for(destination.checkpoints, work.step), self.ranks.rank, {}
        if work.snapshot is not None:
            name = f"rank-{rank:05d}.safetensors"
            files[name] = write_snapshot(folder / name, self._counted(work.chunks()))
        for name, text in work.texts.items():
            files[name] = write_snapshot(folder / name, [memoryview(text.encode())])
        store.write_hashes(folder, rank, files)

    def _finish(self, destination: Destination, work: "_Work") -> None:
        folder = store.folder_for(destination.checkpoints, work.step)
        store.finish(folder, work.step, work.metrics, self.ranks.world_size)
        self.tidy(destination.checkpoints, work.step)

    def _counted(self, chunks: Iterator[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            self._written += len(chunk)
            yield chunk


@dataclass(frozen=True)
class _Work:
    """The input of the thread that writes."""

    step: int
    snapshot: Snapshot | None
    copy: HostCopy | None  # of the snapshot; None: the tensors do not change while they are written
    texts: Mapping[str, str]
    metrics: dict[str, float]

    def chunks(self) -> Iterator[memoryview]:
        assert self.snapshot is not None
        return self.snapshot.chunks() if self.copy is None else self.copy.chunks()
