"""When checkpoints are saved: every so many steps, or with `checkpoint.every: auto` at the interval that loses least.

That interval is first the forecast's. It is computed again twice, from what was measured: the time of a step, at the
first log interval after the warm-up, and the time of writing a checkpoint, when the second one is saved. Both are rank
0's, broadcast at a step that is the same on every rank, so that all ranks always save at the same steps. For how long a
save blocks is not measured: on a GPU the copy to the host is queued, and the host does not see how long it takes.

A checkpoint holds the interval and what was measured. A resumed run goes on with them, so that it saves at the steps at
which it would have saved; on another number of ranks, where steps and interruptions differ, it begins anew.
"""

import json
from collections.abc import Callable
from dataclasses import replace

from shoal.checkpoint.saver import Saved
from shoal.config.schema import Config
from shoal.observe.metrics import Line
from shoal.observe.progress import Reporter
from shoal.parallel.ranks import Ranks
from shoal.plan.goodput import Conditions, best_every
from shoal.train.compare import WARM_UP
from shoal.train.hooks import Hook, LogInterval, RunStart


class SaveInterval(Hook):
    """The steps between checkpoints. Its events only record; `settle` is where all ranks take over a new interval."""

    def __init__(
        self,
        config: Config,
        forecast: Conditions | None,
        ranks: Ranks,
        reporter: Reporter,
        record: Callable[[int], None] = lambda every: None,
    ) -> None:
        """`config` has no auto; `forecast` is None where the interval was given. `record` is called with another
        interval than the config's."""
        assert config.checkpoint.every != "auto", "it is resolved"
        self.config = config
        self.every: int = config.checkpoint.every
        self.forecast = forecast
        self.ranks = ranks
        self.reporter = reporter
        self.record = record
        self.first_step = 0
        # In seconds; 0: not measured, or not taken over yet.
        self.step_seconds = 0.0
        self.written = 0.0
        self._log_interval: float | None = None  # what the last one after the warm-up measured; 0: it was profiled
        self._last_save = 0.0

    def due(self, step: int) -> bool:
        return step % self.every == 0

    def state(self) -> dict[str, float]:
        """For the progress in a checkpoint: empty if the interval was given."""
        if self.forecast is None:
            return {}
        return {
            "world_size": self.ranks.world_size,
            "every": self.every,
            "step_seconds": self.step_seconds,
            "written": self.written,
        }

    def restore(self, state: dict[str, float]) -> None:
        """Go on with the interval of a checkpoint of this run, if it was saved by as many ranks."""
        if self.forecast is None or state.get("world_size") != self.ranks.world_size or state.get("every", 0) < 1:
            return
        self.every = int(state["every"])
        self.step_seconds, self.written = state.get("step_seconds", 0.0), state.get("written", 0.0)
        self.record(self.every)

    def on_run_start(self, start: RunStart) -> None:
        self.first_step = start.step

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        if interval.step - interval.steps >= self.first_step + WARM_UP:
            self._log_interval = 0.0 if interval.profiled else interval.seconds / interval.steps

    def on_save(self, saved: Saved) -> None:
        if saved.folder is not None:
            self._last_save = saved.seconds

    def settle(self, *, all_saved: bool) -> None:
        """After a step, on every rank, and before a checkpoint of it is written. `all_saved`: all ranks know the
        outcome of the last save."""
        if self.forecast is None:
            return
        step = None if self.step_seconds else self._log_interval
        save = None if self.written or not all_saved or not self._last_save else self._last_save
        self._log_interval = None
        # Log lines and saves come at the same steps everywhere, so that all ranks go on from here; what they measured
        # differs.
        if step is None and save is None:
            return
        step, save = json.loads(self.ranks.broadcast(json.dumps([step or 0.0, save or 0.0])))
        if not (step or save):
            return
        self.step_seconds, self.written = step or self.step_seconds, save or self.written
        if not self.step_seconds:
            return
        conditions = self.forecast
        if self.written:
            background = conditions.written > 0
            conditions = replace(conditions, **{"written" if background else "blocked": self.written})
        every = best_every(conditions, self.step_seconds, self.config)
        if every != self.every:
            self.record(every)
            self.reporter.say(
                f"checkpoint.every auto: every {every} steps, with {self.step_seconds:.3g} s per step"
                + (f" and {self.written:.3g} s to write a checkpoint." if self.written else ".")
            )
        self.every = every
