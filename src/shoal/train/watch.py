"""A thread that notices when the run stands still, says which rank is to blame, and ends it so that it can restart."""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.files import write_atomically
from shoal.parallel.ranks import Ranks
from shoal.train.beats import ENDED, Beats
from shoal.train.collectives import last_collectives, who_is_missing

FAILED = 1
SURVIVE_A_PEER = 5.0  # seconds for a rank to fail by itself, with a better reason, once another is dead


class Watch:
    """Told by `beat` that the run goes on. After `timeout` seconds without that:

    every rank writes its stacks and its last collectives to `folder`; the lowest rank that still can compares what all
    have written and tells the launcher who is to blame; a rank that cannot even do that is killed; all end.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        timeout: float,
        *,
        beats: Path | None = None,
        tell: Callable[[str], None] = lambda sentence: print(f"shoal: {sentence}", file=sys.stderr),
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.timeout = timeout
        self.tell = tell
        self.beats = Beats(beats, ranks.rank, ranks.world_size)
        self._main = threading.main_thread().ident
        self._last: float | None = None  # the first step compiles, and may take longer than any other
        self._over = threading.Event()

    def __enter__(self) -> "Watch":
        self.beats.write(0, "starting")
        threading.Thread(target=self._run, name="shoal-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def ended(self) -> None:
        """This rank has come to its end, and others need not take its death for a fault."""
        self.beats.write(self.beats.read(self.ranks.rank).step, ENDED)

    def beat(self, step: int, doing: str) -> None:
        """The run goes on."""
        self._last = time.monotonic()
        self.beats.write(step, doing)

    def _run(self) -> None:
        died_at: float | None = None
        while not self._over.wait(min(1.0, self.timeout / 10)):
            now = time.monotonic()
            if self._last is not None and now - self._last > self.timeout:
                self._end_the_run()
            # Collectives with the dead never end on some devices, and then no signal is heeded either.
            if died_at is None and self.beats.shared and self._peer_died():
                died_at = now
            if died_at is not None and now - died_at > SURVIVE_A_PEER:
                os._exit(FAILED)

    def _peer_died(self) -> bool:
        return any(self.beats.read(rank).died for rank in range(self.ranks.world_size) if rank != self.ranks.rank)

    def _end_the_run(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._dump()
            reports = self._wait_for_others()
            if self.ranks.rank == min(reports):
                sentence = self._verdict(reports)
                write_atomically(self.folder / "verdict.txt", sentence + "\n")
                self.tell(sentence)
                self._end_the_silent(reports)
        finally:
            os._exit(FAILED)

    def _dump(self) -> None:
        beat = self.beats.read(self.ranks.rank)
        collectives = last_collectives()
        with (self.folder / f"rank-{self.ranks.rank:05d}.txt").open("w") as file:
            file.write(
                f"rank {self.ranks.rank}, step {beat.step}, {beat.doing}; no progress for {self.timeout:g} s\n\n"
            )
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write("\nlast collectives, newest last:\n" + "".join(f"  {one}\n" for one in collectives))
        report = {
            "step": beat.step,
            "doing": beat.doing,
            "where": self._where(),
            "collectives": [one.as_dict() for one in collectives],
        }
        write_atomically(self._report(self.ranks.rank), json.dumps(report, indent=1))

    def _report(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def _where(self) -> str:
        """The innermost line of ours, or else of anyone's, at which the main thread is."""
        frame = sys._current_frames().get(self._main or 0)
        innermost = ""
        while frame is not None:
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}"
            innermost = innermost or place
            if f"{os.sep}shoal{os.sep}" in frame.f_code.co_filename:
                return place
            frame = frame.f_back
        return innermost

    def _wait_for_others(self) -> dict[int, dict[str, Any]]:
        """What the ranks have written, once all have, or those that have not can be taken to be unable to."""
        deadline = time.monotonic() + min(5.0, max(2.0, self.timeout / 2))
        while True:
            reports = {}
            for rank in range(self.ranks.world_size):
                with suppress(OSError, ValueError):
                    reports[rank] = json.loads(self._report(rank).read_text())
            if len(reports) == self.ranks.world_size or time.monotonic() > deadline:
                return reports
            time.sleep(0.1)

    def _verdict(self, reports: dict[int, dict[str, Any]]) -> str:
        stood = f"The run stood still for {self.timeout:g} s"
        stacks = f"Every rank's stacks are in {self.folder}."
        silent = [rank for rank in range(self.ranks.world_size) if rank not in reports]
        if silent:
            beat = self.beats.read(silent[0])
            known = f" {beat.state}; it was {beat.doing} after step {beat.step}" if beat.process else " gives no answer"
            more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
            return f"{stood}: rank {silent[0]}{more}{known}. {stacks}"
        found = who_is_missing({rank: report["collectives"] for rank, report in reports.items()})
        rank = found[0] if found else min(reports, key=lambda one: self.beats.read(one).when)
        report = reports[rank]
        missing = f" has not come to {found[1]}, in which others wait" if found else " was the first to stand still"
        return (
            f"{stood}: rank {rank}{missing}; it was {report['doing']} after step {report['step']}, at "
            f"{report['where']}. {stacks}"
        )

    def _end_the_silent(self, reports: dict[int, dict[str, Any]]) -> None:
        """A process that is stopped does not heed the agent's request to end, only this."""
        for rank in range(self.ranks.world_size):
            process = self.beats.read(rank).process
            if rank not in reports and process and self.beats.shared:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
