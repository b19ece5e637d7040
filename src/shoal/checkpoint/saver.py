"""Writing checkpoints together with all ranks, behind training's back or in front of it.

Training waits for the copy off the device and no longer; a thread writes, and the threads of all ranks agree over a
group of their own on how it went. One save is under way at a time: the next waits for it.
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

# The place is there and has no room: it may have some again. Anything else will not mend itself.
NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
NOT_THE_DISK = 100_000  # no number of the system's: an exception that is ours to answer for


@dataclass(frozen=True)
class Place:
    """A folder for checkpoints, and what makes it one."""

    checkpoints: Path
    prepare: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Saved:
    """How a save ended: the same on every rank."""

    step: int
    folder: Path | None  # where it is whole; None: nowhere
    problems: tuple[tuple[Path, int], ...]  # places where it failed, with the system's number for why
    seconds: float  # of writing

    @property
    def unwritable(self) -> bool:
        """Whether the run's own place failed for more than want of room."""
        return bool(self.problems) and self.problems[0][1] not in NO_ROOM

    def explain(self) -> str:
        return "; ".join(f"{place}: {os.strerror(number)}" for place, number in self.problems)


class Saver:
    """Saves to the first of `places` that takes it."""

    def __init__(
        self,
        places: Sequence[Place],
        ranks: Ranks,
        *,
        in_background: bool = True,
        full: bool = False,
        tidy: Callable[[Path, int], object] = lambda checkpoints, step: None,
        while_waiting: Callable[[], None] = lambda: None,
        patience: float = math.inf,
    ) -> None:
        self.places = places
        self.ranks = ranks
        self.in_background = in_background
        self.full = full
        self.tidy = tidy
        self.while_waiting = while_waiting  # told now and then while a save is waited for
        self.patience = patience  # … unless this rank has written nothing for so many seconds: others may write yet
        self.waited = 0.0  # seconds that training stood still for saves
        self._meeting: Ranks | None = None  # made at the first save: many a rank is set up that never saves
        self._copy = HostCopy(ranks.device)
        self._written = 0
        self._thread: threading.Thread | None = None
        self._ended: Saved | None = None
        self._crash: BaseException | None = None

    def save(
        self, step: int, parts: Mapping[str, Part], texts: Mapping[str, str], metrics: dict[str, float]
    ) -> Saved | None:
        """Save `parts` (this rank's) and, on rank 0, `texts` (name of the file → contents).

        Returns how the save before this one ended, if nobody has asked yet. Without `in_background` this one has ended
        too, and `settle` says how.
        """
        before = self.settle()
        began = time.perf_counter()
        self._meeting = self._meeting or self.ranks.apart()
        if self.full:
            parts = gather(parts, self.ranks, self.while_waiting)
        image = snapshot_of(parts) if parts else None
        # What was gathered is a copy already.
        gathered = self.full and self.ranks.world_size > 1
        copied = self.in_background and not gathered
        if copied and image is not None:
            try:
                self._copy.take(image)
            except (RuntimeError, MemoryError):  # no room for a copy: then it is written while training waits
                copied, self._copy = False, HostCopy(self.ranks.device)
        work = _Work(step, image, self._copy if copied else None, texts, metrics)
        self._thread = threading.Thread(target=self._run, args=(work,), name="shoal-save", daemon=True)
        self._thread.start()
        self.waited += time.perf_counter() - began
        if not (copied or (gathered and self.in_background)):
            self._wait()
        return before

    def settle(self) -> Saved | None:
        """Wait for the save that is under way. How it ended is said once."""
        self._wait()
        return self._take()

    def poll(self) -> Saved | None:
        """As `settle`, but without waiting: nothing if nothing has ended. Ranks may see it some steps apart."""
        return None if self._thread is not None and self._thread.is_alive() else self.settle()

    def _wait(self) -> None:
        if self._thread is None:
            return
        began = moved = time.perf_counter()
        seen = self._written
        while self._thread.is_alive():
            self._thread.join(1)
            if self._written != seen:
                seen, moved = self._written, time.perf_counter()
            if time.perf_counter() - moved < self.patience:
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
        if self.ranks.device.type == "cuda":  # else a thread's is the first, which belongs to another rank
            torch.cuda.set_device(self.ranks.device)
        problems: list[tuple[Path, int]] = []
        folder: Path | None = None
        try:
            for place in self.places:
                number = self._save_in(place, work)
                if number == NOT_THE_DISK:
                    break
                if number == 0:
                    folder = store.folder_for(place.checkpoints, work.step)
                    break
                problems.append((place.checkpoints, number))
        except BaseException as error:  # of the meeting itself: another rank is gone
            self._crash = error
        self._ended = Saved(work.step, folder, tuple(problems), time.perf_counter() - began)

    def _save_in(self, place: Place, work: "_Work") -> int:
        """Zero on every rank if the checkpoint is whole there, or else the number of what was in the way."""
        number = self._agree(lambda: self._begin(place, work.step) if self.ranks.first else None)
        if number == 0:
            number = self._agree(lambda: self._write(place, work))
        if number == 0:
            number = self._agree(lambda: self._finish(place, work) if self.ranks.first else None)
        if number and self.ranks.first:
            shutil.rmtree(store.folder_for(place.checkpoints, work.step), ignore_errors=True)
        return number

    def _agree(self, act: Callable[[], object]) -> int:
        """Act, and hear from all ranks whether it went well: the largest of their error numbers."""
        number = 0
        try:
            act()
        except OSError as error:
            number = error.errno or errno.EIO
        except BaseException as error:
            self._crash, number = error, NOT_THE_DISK
        assert self._meeting is not None
        return int(self._meeting.largest(number))

    def _begin(self, place: Place, step: int) -> None:
        place.prepare()
        store.begin(place.checkpoints, step)

    def _write(self, place: Place, work: "_Work") -> None:
        """This rank's files, and what they should hash to: a list that the manifest takes over."""
        folder, rank, files = store.folder_for(place.checkpoints, work.step), self.ranks.rank, {}
        if work.image is not None:
            name = f"rank-{rank:05d}.safetensors"
            files[name] = write_snapshot(folder / name, self._counted(work.chunks()))
        for name, text in work.texts.items():
            files[name] = write_snapshot(folder / name, [memoryview(text.encode())])
        store.leave_hashes(folder, rank, files)

    def _finish(self, place: Place, work: "_Work") -> None:
        folder = store.folder_for(place.checkpoints, work.step)
        store.finish(folder, work.step, work.metrics, self.ranks.world_size)
        self.tidy(place.checkpoints, work.step)

    def _counted(self, chunks: Iterator[memoryview]) -> Iterator[memoryview]:
        for chunk in chunks:
            self._written += len(chunk)
            yield chunk


@dataclass(frozen=True)
class _Work:
    """What a thread writes."""

    step: int
    image: Snapshot | None
    copy: HostCopy | None  # of the image; None: the tensors themselves are written, and do not change meanwhile
    texts: Mapping[str, str]
    metrics: dict[str, float]

    def chunks(self) -> Iterator[memoryview]:
        assert self.image is not None
        return self.image.chunks() if self.copy is None else self.copy.chunks()
