"""Keeps `report.html` in the run's folder up to date, on rank 0."""

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from shoal.observe.report_page import write_report
from shoal.observe.run_reader import RunReader
from shoal.train.hooks import Hook, RunStart

FIRST = 5.0  # seconds until the first page
EVERY = 30.0  # seconds between pages
# The thread that makes a page takes turns with training: it works for no more than this share of the time.
SHARE = 0.003


class ReportPage(Hook):
    """Writes the page from the run's files: from time to time in a thread, for which the loop does not wait, and at the
    end. First of all hooks, so that it ends last, when the others have written what they write."""

    def __init__(self, config: Mapping[str, Any], warn: Callable[[str], None]) -> None:
        self.config = config
        self.warn = warn
        self.stopped = False
        self._reader: RunReader | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def on_run_start(self, start: RunStart) -> None:
        if start.ranks.first:
            self._reader = RunReader(start.folder, config=self.config)
            self._thread = threading.Thread(target=self._refresh, name="report", daemon=True)
            self._thread.start()

    def on_stop(self, step: int, reason: str) -> None:
        self.stopped = reason == "signal"

    def on_run_end(self, error: BaseException | None) -> None:
        self._ended.set()
        if self._thread is None:
            return
        self._thread.join()
        state = "failed" if error is not None else "stopped" if self.stopped else "finished"
        try:
            self._write(state, "" if error is None else str(error).strip() or type(error).__name__)
        except Exception as failure:  # a page must not end a run
            self.warn(f"report.html cannot be written: {failure}. shoal report RUN writes it later.")

    def _refresh(self) -> None:
        pause = FIRST
        while not self._ended.wait(pause):
            began = time.perf_counter()
            with suppress(Exception):  # it is tried again, and said at the end
                self._write("running", "")
            pause = max(EVERY, (time.perf_counter() - began) / SHARE)

    def _write(self, state: str, detail: str) -> None:
        assert self._reader is not None
        write_report(self._reader.read(state=state, detail=detail))
