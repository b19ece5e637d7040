"""Profiles a few steps of a run with torch.profiler: a trace per rank, and a summary that is held against the plan."""

import gzip
import json
import os
import shutil
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shoal.files import write_atomically
from shoal.observe.profile.ranges import STEP, ranges_recorded
from shoal.observe.profile.split import NothingRecorded, split
from shoal.observe.profile.summary import FOLDER, SHARED, SUMMARY, of_ranks, shared_values, summarize_rank
from shoal.observe.profile.trace import read_trace
from shoal.observe.progress import Reporter
from shoal.plan.resolved import ResolvedRun
from shoal.train.hooks import Hook, RunStart, StepEnd, Values
from shoal.train.log import StepLog
from shoal.train.profile_advice import find_bottleneck, forecast_terms

# Steps after a start that are not recorded: they compile and allocate the optimizer state.
WARM_UP = 5
# Recorded, but not counted: what runs at the edges of a recording overlaps with what was not recorded.
EDGES = 2
# Allocations that the snapshot of a GPU's memory remembers.
MOST_ALLOCATIONS = 100_000


class Profiler(Hook):
    """Records `steps` steps after warm-up. Unlike other hooks it waits for the device, when the recording begins and
    ends; log lines with recorded steps say `"profiled": true`.

    On CUDA, the step after the recorded ones is trained with the history of its allocations, for a snapshot of memory:
    it would slow down the recorded ones.
    """

    def __init__(self, steps: int, log: StepLog, reporter: Reporter) -> None:
        self.steps = steps
        self.log = log
        self.reporter = reporter
        self._begin = self._end = -1  # begins after the one, ends after the other
        self._records_allocations = False
        self._recording = ExitStack()
        self._profile: profile | None = None
        self._range: record_function | None = None
        self._values: list[float] = [0.0] * len(SHARED)
        self._summary: dict[str, Any] | None = None

    def on_run_start(self, start: RunStart) -> None:
        self.start, self.folder = start, start.folder / FOLDER
        if start.ranks.first:
            (self.folder / SUMMARY).unlink(missing_ok=True)  # of an earlier start
        left = start.steps - start.step
        # What ranks share arrives after the next step, and a first step warms up.
        after = int(start.ranks.world_size > 1)
        steps = min(self.steps, left - 1 - EDGES - after)
        if steps < 1:
            self.reporter.warn(
                f"no step is profiled: {left} steps are left, and a profile needs {2 + EDGES + after} or more."
            )
            return
        if steps < self.steps:
            self.reporter.warn(f"{steps} steps are profiled, not {self.steps}: only {left} are left.")
            self.steps = steps
        self._begin = start.step + min(WARM_UP, left - EDGES - steps - after)
        self._end = self._begin + EDGES + steps
        # Kineto announces itself on standard error otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        self._open_range_after(start.step)

    def on_step_end(self, end: StepEnd) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if end.step == self._end:
            self._stop()
        elif end.step == self._end + 1:
            self._settle()
        self._open_range_after(end.step)

    def on_run_end(self, error: BaseException | None) -> None:
        if self._profile is not None:  # stopped early, or failed
            self._recording.close()
            self._profile = None
            self.reporter.warn("the run ended before the profile was complete; nothing of it was written.")
        if self._records_allocations:
            torch.cuda.memory._record_memory_history(enabled=None)

    def share(self) -> Values:
        return self._values

    def on_shared(self, values: Sequence[Values]) -> None:
        if self._summary is None or not self.start.ranks.first or not all(any(one) for one in values):
            return
        self._write_summary(self._summary, of_ranks(values))

    def _open_range_after(self, step: int) -> None:
        if step == self._begin:
            self._start()
        if self._profile is not None:
            self._range = record_function(f"{STEP} {step + 1}")
            self._range.__enter__()  # type: ignore[no-untyped-call]

    def _start(self) -> None:
        device = self.start.ranks.device
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize(device)
        self.reporter.say(f"Profiling steps {self._begin + 2} to {self._end - 1} …")
        self._profile = profile(activities=activities, profile_memory=True)
        self._recording.enter_context(self._profile)
        self._recording.enter_context(ranges_recorded())
        self.log.profiled = True

    def _stop(self) -> None:
        """Write the trace and what it says."""
        assert self._profile is not None
        found, self._profile = self._profile, None
        self._recording.close()
        device, rank = self.start.ranks.device, self.start.ranks.rank
        began = time.perf_counter()
        try:
            self.folder.mkdir(exist_ok=True)
            summary = self._export(found, self.folder / f"rank-{rank}.trace.json.gz")
            write_atomically(self.folder / f"rank-{rank}.json", json.dumps(summary, indent=1) + "\n")
            self._values, self._summary = shared_values(summary), summary
        except (OSError, NothingRecorded) as error:
            self._warn(error)
        self.reporter.say(f"Profiled; its files took {time.perf_counter() - began:.1f} s.")
        if device.type == "cuda":
            torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS, stacks="python")
            self._records_allocations = True

    def _export(self, found: profile, path: Path) -> dict[str, Any]:
        """Write the trace to `path`, compressed, and return what it says."""
        plain = path.with_suffix("")
        try:
            found.export_chrome_trace(str(plain))
            trace = read_trace(plain)
            # The profiler would compress as well, and take most of the time for it.
            with plain.open("rb") as source, gzip.open(path, "wb", compresslevel=1) as target:
                shutil.copyfileobj(source, target, 1 << 20)
        finally:
            plain.unlink(missing_ok=True)
        return summarize_rank(trace, split(trace)) | {"trace": path.name}

    def _write_summary(self, summary: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        resolved = self.start.resolved
        assert isinstance(resolved, ResolvedRun), "only a run with a forecast is profiled"
        expected = forecast_terms(resolved)
        terms: dict[str, float] = summary["terms"]
        notes = []
        if not resolved.is_promise:
            why = "of a CPU" if resolved.machine.is_cpu else "of a model that it only resembles"
            notes.append(f"The forecast is rough: it is that {why}.")
        whole = {
            "folder": str(self.folder),
            "profiled": [self._begin + 2, self._end - 1],
            "world_size": self.start.ranks.world_size,
            "bottleneck": find_bottleneck(terms, resolved, ranks).as_dict(),
            **summary,
            "forecast": {
                "step_seconds": round(resolved.speed.step_seconds, 9),
                "terms": {term: round(seconds, 9) for term, seconds in expected.items()},
                "is_promise": resolved.is_promise,
            },
            "ranks": ranks,
            "notes": notes,
        }
        self._summary = None
        try:
            write_atomically(self.folder / SUMMARY, json.dumps(whole, indent=1) + "\n")
        except OSError as error:
            self._warn(error)
            return
        self.reporter.say(f"Profile: {whole['bottleneck']['sentence']} See {self.folder / SUMMARY}.")

    def _warn(self, error: Exception) -> None:
        """A full disk must not end a run that does not depend on these files."""
        self.reporter.warn(f"the profile cannot be written: {error}. Training continues.")

    def _settle(self) -> None:
        """After one more step, in which ranks have waited for each other's files: write the snapshot of a GPU's memory,
        for PyTorch's own viewer. It is a pickle, and nothing here reads it."""
        if self._records_allocations:
            path = self.folder / f"rank-{self.start.ranks.rank}.memory_snapshot.pickle"
            try:
                torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
            except OSError as error:
                self.reporter.warn(f"{path} cannot be written: {error}. Training continues.")
            torch.cuda.memory._record_memory_history(enabled=None)
            self._records_allocations = False
        self.log.profiled = False
        self.log.restart_clock()
