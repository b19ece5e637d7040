"""A thread that detects a hung run, finds the rank that caused it, and ends the run so that it can be restarted."""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal.files import write_atomically
from shoal.parallel.ranks import Ranks
from shoal.resilience.collectives import find_missing_rank, last_collectives
from shoal.resilience.heartbeat import DEAD, ENDED, STOPPED, Heartbeats

FAILED, VERDICT = 1, "verdict.txt"
GRACE = 5.0  # seconds for a rank to write its report
SIGN_EVERY = 10.0  # seconds between signs of life for ranks of other nodes, which cannot read the heartbeats here
SURVIVE_A_PEER = 5.0  # seconds for a rank to fail by itself, with a better message, after another died


def print_sentence(sentence: str) -> None:
    print(f"shoal: {sentence}", file=sys.stderr)


class Watchdog:
    """Ends the run after `timeout` seconds without a heartbeat.

    Every rank writes its stacks and its last collectives to `folder`. The lowest rank that responds compares them and
    tells the launcher which rank caused the hang. Ranks that do not respond are killed, and all processes exit.
    """

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        timeout: float,
        *,
        heartbeats: Path | None = None,
        tell: Callable[[str], None] = print_sentence,
    ) -> None:
        self.folder = folder
        self.ranks = ranks
        self.timeout = timeout
        self.tell = tell
        self.heartbeats = Heartbeats(heartbeats, ranks.rank, ranks.world_size)
        self._main = threading.main_thread().ident
        self._last: float | None = None  # None: paused. The first step compiles and may take longer
        self._longest = 0.0  # between two heartbeats
        self._over = threading.Event()
        self._signs = min(SIGN_EVERY, timeout / 4) if ranks.world_size > 1 and not self.heartbeats.shared else None
        self._last_sign = 0.0

    def start(self) -> None:
        self.heartbeats.write(0, "starting")
        with suppress(OSError):  # left by an earlier attempt that hung
            (self.folder / VERDICT).unlink(missing_ok=True)
            self._report(self.ranks.rank).unlink()
        threading.Thread(target=self._run, name="shoal-watchdog", daemon=True).start()

    def stop(self, *, failed: bool) -> None:
        """Unless it `failed`, this rank is done, and its exit is not a failure."""
        self._over.set()
        with suppress(OSError):
            self._sign(self.ranks.rank).unlink(missing_ok=True)
            self.folder.rmdir()  # unless it holds anything
        if not failed:
            self.heartbeats.write(self.heartbeats.read(self.ranks.rank).step, ENDED)

    def heartbeat(self, step: int, activity: str) -> None:
        """The run makes progress."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._last or now))
        self._last = now
        self.heartbeats.write(step, activity)

    def pause(self, step: int, activity: str) -> None:
        """No timeout until the next heartbeat."""
        self._last = None
        self.heartbeats.write(step, activity)

    def _run(self) -> None:
        died_at: float | None = None
        while not self._over.wait(min(1.0, self.timeout / 10)):
            now = time.monotonic()
            if self._signs is not None and now - self._last_sign > self._signs:
                self._last_sign = now
                self._leave_sign()
            if self._last is not None and now - self._last > self.timeout:
                self._end_the_run()
            # A collective with a dead rank never returns on some devices, and then signals are not handled either.
            if died_at is None and self.heartbeats.shared and self._peer_died():
                died_at = now
            if died_at is not None and now - died_at > SURVIVE_A_PEER:
                os._exit(FAILED)

    def _leave_sign(self) -> None:
        heartbeat = self.heartbeats.read(self.ranks.rank)
        sign = {"host": socket.gethostname(), "step": heartbeat.step, "doing": heartbeat.activity}
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            self._sign(self.ranks.rank).write_text(json.dumps(sign))

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
                self._kill_unresponsive(reports)
            else:  # the first exit breaks connections, and the rank with the verdict could fail before it is written
                deadline = time.monotonic() + GRACE
                while not (self.folder / VERDICT).exists() and time.monotonic() < deadline:
                    time.sleep(0.1)
        finally:
            os._exit(FAILED)

    def _dump(self) -> dict[str, Any]:
        """Write the stacks and collectives of this rank. A disk that cannot be written is ignored."""
        heartbeat, collectives = self.heartbeats.read(self.ranks.rank), last_collectives()
        report = {
            "host": socket.gethostname(),
            "step": heartbeat.step,
            "doing": heartbeat.activity,
            "stood_still_at": time.time() - (time.monotonic() - heartbeat.when),
            "where": self._where(),
            "collectives": [one.as_dict() for one in collectives],
        }
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            with (self.folder / f"rank-{self.ranks.rank:05d}.txt").open("w") as file:
                state = f"{heartbeat.activity}; no progress for {self.timeout:g} s"
                file.write(f"rank {self.ranks.rank}, step {heartbeat.step}, {state}\n\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
                file.write("\nlast collectives, newest last:\n" + "".join(f"  {one}\n" for one in collectives))
            write_atomically(self._report(self.ranks.rank), json.dumps(report, indent=1))
        return report

    def _report(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def _sign(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.alive"

    def _where(self) -> str:
        """The innermost line of shoal in the main thread's stack, else the innermost line of any code."""
        frame = sys._current_frames().get(self._main or 0)
        innermost = ""
        while frame is not None:
            line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}"
            innermost = innermost or line
            if f"{os.sep}shoal{os.sep}" in frame.f_code.co_filename:
                return line
            frame = frame.f_back
        return innermost

    def _wait_for_others(self, own: dict[str, Any]) -> dict[int, dict[str, Any]]:
        """The reports of all ranks that respond.

        The rank that hung first times out first; the others, which waited for it, time out later.
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
        """Whether a rank without a report may still write one."""
        now = time.monotonic()
        if not self.heartbeats.shared:
            return now < began + 2 * self._longest + GRACE
        heartbeat = self.heartbeats.read(rank)
        if heartbeat.state in (STOPPED, DEAD):
            return now < began + 1  # it may be about to continue
        return now < heartbeat.when + self.timeout + GRACE

    def _verdict(self, reports: dict[int, dict[str, Any]]) -> str:
        hung = f"The run made no progress for {self.timeout:g} s"
        stacks = f"The stacks of all ranks are in {self.folder}."
        silent = [rank for rank in range(self.ranks.world_size) if rank not in reports]
        if silent:
            last = self.heartbeats.read(silent[0])
            known = " does not respond"
            if last.process:
                known = f" {last.state}; it was {last.activity} after step {last.step}"
            with suppress(OSError, ValueError, KeyError):
                sign = json.loads(self._sign(silent[0]).read_text())
                known = f" on {sign['host']}{known}; it was {sign['doing']} after step {sign['step']}"
            more = f" (and {len(silent) - 1} more)" if len(silent) > 1 else ""
            return f"{hung}: rank {silent[0]}{more}{known}. {stacks}"
        found = find_missing_rank({rank: report["collectives"] for rank, report in reports.items()})
        rank = found[0] if found else min(reports, key=lambda one: float(reports[one]["stood_still_at"]))
        report = reports[rank]
        host = f" on {report['host']}" if len({one["host"] for one in reports.values()}) > 1 else ""
        missing = f" has not reached {found[1]}, in which others wait" if found else " was the first to hang"
        return (
            f"{hung}: rank {rank}{host}{missing}; it was {report['doing']} after step {report['step']}, at "
            f"{report['where']}. {stacks}"
        )

    def _kill_unresponsive(self, reports: dict[int, dict[str, Any]]) -> None:
        """A stopped process does not handle SIGTERM, only SIGKILL."""
        for rank in range(self.ranks.world_size):
            process = self.heartbeats.read(rank).process
            if rank not in reports and process and self.heartbeats.shared:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
