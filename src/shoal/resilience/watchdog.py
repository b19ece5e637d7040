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
from shoal.resilience.collectives import last_collectives, who_is_missing
from shoal.resilience.heartbeat import ENDED, GONE, STOPPED, Heartbeats

FAILED, VERDICT = 1, "verdict.txt"
GRACE = 5.0  # seconds for a rank to write its report, once it is its turn
SURVIVE_A_PEER = 5.0  # seconds for a rank to fail by itself, with a better reason, once another is dead


class Watchdog:
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
        heartbeats: Path | None = None,
        tell: Callable[[str], None] = lambda sentence: print(f"shoal: {sentence}", file=sys.stderr),
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.timeout = timeout
        self.tell = tell
        self.heartbeats = Heartbeats(heartbeats, ranks.rank, ranks.world_size)
        self._main = threading.main_thread().ident
        self._last: float | None = None  # none: not watched. The first step compiles, and may take longer than any
        self._longest = 0.0  # between two beats
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        self.heartbeats.write(0, "starting")
        with suppress(OSError):  # of a start before this one, which got so far that it hung and no farther
            (self.folder / VERDICT).unlink(missing_ok=True)
            self._report(self.ranks.rank).unlink()
        threading.Thread(target=self._run, name="shoal-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def ended(self) -> None:
        """This rank has come to its end, and others need not take its death for a fault."""
        self.heartbeats.write(self.heartbeats.read(self.ranks.rank).step, ENDED)

    def beat(self, step: int, doing: str) -> None:
        """The run goes on."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._last or now))
        self._last = now
        self.heartbeats.write(step, doing)

    def rest(self, step: int, doing: str) -> None:
        """The next beat may take as long as it will."""
        self._last = None
        self.heartbeats.write(step, doing)

    def _run(self) -> None:
        died_at: float | None = None
        while not self._over.wait(min(1.0, self.timeout / 10)):
            now = time.monotonic()
            if self._last is not None and now - self._last > self.timeout:
                self._end_the_run()
            # Collectives with the dead never end on some devices, and then no signal is heeded either.
            if died_at is None and self.heartbeats.shared and self._peer_died():
                died_at = now
            if died_at is not None and now - died_at > SURVIVE_A_PEER:
                os._exit(FAILED)

    def _peer_died(self) -> bool:
        return any(self.heartbeats.read(rank).died for rank in range(self.ranks.world_size) if rank != self.ranks.rank)

    def _end_the_run(self) -> None:
        try:
            own = self._dump()
            reports = self._wait_for_others(own)
            if self.ranks.rank == min(reports):
                sentence = self._verdict(reports)
                self.tell(sentence)
                with suppress(OSError):
                    write_atomically(self.folder / VERDICT, sentence + "\n")
                self._end_the_silent(reports)
            else:  # with the first that goes, connections break, and the others may end before they have spoken
                deadline = time.monotonic() + GRACE
                while not (self.folder / VERDICT).exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
        finally:
            os._exit(FAILED)

    def _dump(self) -> dict[str, Any]:
        """Write where this rank is, for people and for the other ranks; a disk that takes nothing is no obstacle."""
        beat, collectives = self.heartbeats.read(self.ranks.rank), last_collectives()
        report = {
            "step": beat.step,
            "doing": beat.doing,
            "stood_still_at": time.time() - (time.monotonic() - beat.when),
            "where": self._where(),
            "collectives": [one.as_dict() for one in collectives],
        }
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            with (self.folder / f"rank-{self.ranks.rank:05d}.txt").open("w") as file:
                stood = f"no progress for {self.timeout:g} s"
                file.write(f"rank {self.ranks.rank}, step {beat.step}, {beat.doing}; {stood}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\nlast collectives, newest last:\n" + "".join(f"  {one}\n" for one in collectives))
            write_atomically(self._report(self.ranks.rank), json.dumps(report, indent=1))
        return report

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

    def _wait_for_others(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """What the ranks have written, once all have that can.

        The rank that stood still first is the first to get here, and the others, who waited for it, come after it by
        as much as they were ahead.
        """
        began = time.monotonic()
        reports = {self.ranks.rank: own}
        while True:
            for rank in range(self.ranks.world_size):
                with suppress(OSError, ValueError):
                    reports.setdefault(rank, json.loads(self._report(rank).read_text()))
            if not any(self._may_answer(rank, began) for rank in range(self.ranks.world_size) if rank not in reports):
                return reports
            time.sleep(0.1)

    def _may_answer(self, rank: int, began: float) -> bool:
        """Whether a rank that has written nothing yet can still be expected to."""
        now = time.monotonic()
        if not self.heartbeats.shared:
            return now < began + 2 * self._longest + GRACE
        beat = self.heartbeats.read(rank)
        if beat.state in (STOPPED, GONE):
            return now < began + 1  # it may have been about to be taken up again
        return now < beat.when + self.timeout + GRACE

    def _verdict(self, reports: dict[int, dict[str, Any]]) -> str:
        stood = f"The run stood still for {self.timeout:g} s"
        stacks = f"Every rank's stacks are in {self.folder}."
        silent = [rank for rank in range(self.ranks.world_size) if rank not in reports]
        if silent:
            beat = self.heartbeats.read(silent[0])
            known = f" {beat.state}; it was {beat.doing} after step {beat.step}" if beat.process else " gives no answer"
            more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
            return f"{stood}: rank {silent[0]}{more}{known}. {stacks}"
        found = who_is_missing({rank: report["collectives"] for rank, report in reports.items()})
        rank = found[0] if found else min(reports, key=lambda one: float(reports[one]["stood_still_at"]))
        report = reports[rank]
        missing = f" has not come to {found[1]}, in which others wait" if found else " was the first to stand still"
        return (
            f"{stood}: rank {rank}{missing}; it was {report['doing']} after step {report['step']}, at "
            f"{report['where']}. {stacks}"
        )

    def _end_the_silent(self, reports: dict[int, dict[str, Any]]) -> None:
        """A process that is stopped does not heed the agent's request to end, only this."""
        for rank in range(self.ranks.world_size):
            process = self.heartbeats.read(rank).process
            if rank not in reports and process and self.heartbeats.shared:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
