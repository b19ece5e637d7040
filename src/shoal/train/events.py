"""The events of a run, written by rank 0 to `events.jsonl`."""

import logging
import socket
import time
from collections.abc import Sequence

from shoal.checkpoint.saver import Saved
from shoal.checkpoint.store import read_manifest
from shoal.observe.events import END, FAULT, SAVE, START, STOP, EventLog
from shoal.observe.logs import current_events
from shoal.train.hooks import Fault, Hook, RunStart, StepEnd

LOGGER = logging.getLogger(__name__)


class RunEvents(Hook):
    """Writes starts, saves, stops, faults and the end. Warnings are written where they are logged."""

    def __init__(self, attempt: int, command: Sequence[str], device: str) -> None:
        self.attempt = attempt
        self.command = list(command)
        self.device = device  # its name
        self.events: EventLog | None = None
        self._began = time.monotonic()

    def on_run_start(self, start: RunStart) -> None:
        if not start.ranks.first:
            return
        # The one that warnings are written to, so that they have the step.
        self.events = current_events() or EventLog(start.folder)
        self.events.attempt, self.events.step = self.attempt, start.step
        self.events.write(
            START,
            world_size=start.ranks.world_size,
            from_step=start.step,
            steps=start.steps,
            command=self.command,
            host=socket.gethostname(),
            devices=self.device,
        )

    def on_step_end(self, end: StepEnd) -> None:
        if self.events is not None:
            self.events.step = end.step

    def on_save(self, saved: Saved) -> None:
        if self.events is None:
            return
        found = None if saved.folder is None else read_manifest(saved.folder)
        self.events.write(
            SAVE,
            step=saved.step,
            path=None if saved.folder is None else str(saved.folder),
            seconds=round(saved.seconds, 3),
            bytes=None if found is None else found.size,
            ok=saved.folder is not None,
            error=saved.explain() or None,
        )
        LOGGER.debug("step %d was written in %.2f s to %s", saved.step, saved.seconds, saved.folder)

    def on_stop(self, step: int, reason: str) -> None:
        if self.events is not None:
            self.events.write(STOP, step=step, reason=reason)

    def on_fault(self, fault: Fault) -> None:
        if self.events is not None:
            self.events.write(FAULT, step=fault.step, text=fault.sentence or type(fault.error).__name__)

    def on_run_end(self, error: BaseException | None) -> None:
        if self.events is not None:
            said = None if error is None else str(error).strip() or type(error).__name__
            self.events.write(END, error=said, seconds=round(time.monotonic() - self._began, 3))
