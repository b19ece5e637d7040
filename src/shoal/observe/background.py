"""A sink that may wait for a network: a thread opens it and writes to it, so that training never waits."""

import logging
import queue
import threading
from collections.abc import Callable

from shoal.observe.metrics import Line, Sink

LOGGER = logging.getLogger(__name__)
LINES = 1000  # that may wait to be written
PATIENCE = 60.0  # seconds for what is left, at the end of a run


class SinkFailed(Exception):
    """The thread could not open or write the sink. The message says why."""


class Background:
    """Writes to the sink that `open_sink` returns, in a thread. A failure there is raised by the next `write`."""

    def __init__(self, name: str, open_sink: Callable[[], Sink], *, patience: float | None = None) -> None:
        self.name = name
        self.patience = PATIENCE if patience is None else patience
        self._open = open_sink
        self._lines: queue.Queue[Line | None] = queue.Queue(LINES)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"shoal-{name}", daemon=True)
        self._thread.start()

    def write(self, line: Line) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            self._lines.put_nowait(dict(line))
        except queue.Full:
            raise SinkFailed(f"it is {LINES} lines behind") from None

    def close(self) -> None:
        """Wait for the lines that are left, but not forever."""
        try:
            self._lines.put_nowait(None)
        except queue.Full:
            raise SinkFailed(f"it is {LINES} lines behind") from None
        self._thread.join(self.patience)
        if self._thread.is_alive():
            raise SinkFailed(f"it was not done after {self.patience:g} s")
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            sink = self._open()
            LOGGER.debug("%s is open", self.name)
            while (line := self._lines.get()) is not None:
                sink.write(line)
            sink.close()
        except BaseException as error:  # of any library; the next write raises it
            self._failure = error
