"""Hooks: what watches, logs, profiles or reports a run, without the training loop knowing of it.

    class Beep(Hook):
        def on_save(self, saved):
            print("\\a")

    shoal.api.train(config, hooks=[Beep()])

Every rank has its own hooks. Events come in the same order on every rank, except `on_save` and `on_activity`, which
depend on the disk of each rank: a hook communicates through `share`, not by collectives of its own. It observes: it
does not decide how the run goes on (`resilience.health` does), and does not wait for the device, except in
`on_run_end`. An exception that a hook raises ends the run; after another failure it is a warning.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.checkpoint.saver import Saved
from shoal.config.resolve import ResolvedConfig
from shoal.observe.metrics import Line
from shoal.parallel.ranks import Ranks

Values = Sequence[float]


@dataclass(frozen=True)
class RunStart:
    """The run is set up, and its checkpoint, if any, is loaded."""

    folder: Path
    resolved: ResolvedConfig
    ranks: Ranks
    step: int  # of the checkpoint; 0 for a new run
    steps: int  # the last step


@dataclass(frozen=True)
class StepEnd:
    """A step was launched; the device may still be computing it."""

    step: int
    data_seconds: float  # for which it waited for data
    step_seconds: float  # mean of the last log interval; 0 before the first


@dataclass(frozen=True)
class LogInterval:
    """The steps between two log lines."""

    step: int  # the last step
    steps: int
    seconds: float  # for all steps
    positions: int  # tokens of this rank's sequences
    mfu: float | None
    allocated_gib: float  # peak so far, maximum over ranks
    reserved_gib: float | None
    profiled: bool = False  # slowed down by a profiler: not a measure of speed


@dataclass(frozen=True)
class Fault:
    """Something went wrong after `step`: a rollback, or an exception that ends the run."""

    step: int
    error: BaseException | None
    sentence: str


class Hook:
    """Override the events you need."""

    def on_run_start(self, start: RunStart) -> None:
        """Before the first step of this process."""

    def on_step_end(self, end: StepEnd) -> None:
        """After every step."""

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        """At every log line, one step late: `line` is what `metrics.jsonl` holds."""

    def on_evaluation(self, line: Line) -> None:
        """After an evaluation; `line` has its metrics."""

    def on_activity(self, step: int, activity: str) -> None:
        """Progress on something other than a step: "evaluating", "saving", "waiting for a save"."""

    def on_save(self, saved: Saved) -> None:
        """A save has ended, successfully or not. With asynchronous saves, at some later step."""

    def on_stop(self, step: int, reason: str) -> None:
        """The run ends before its last step: "signal" or "early_stop"."""

    def on_fault(self, fault: Fault) -> None:
        """A rollback begins, or an exception ends the run."""

    def on_run_end(self, error: BaseException | None) -> None:
        """Always last, if `on_run_start` has returned. `error` is None unless an exception ends the run."""

    def share(self) -> Values:
        """Values of this rank that all ranks get to see after the next step: always as many, on every rank."""
        return ()

    def on_shared(self, values: Sequence[Values]) -> None:
        """What every rank has shared, by rank. With several ranks it arrives after the next step."""


class Hooks(Hook):
    """Calls every hook in order, and those that have started in reverse order at the end. A failure of the run is not
    hidden by one of a hook."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.hooks: list[Hook] = []
        self.warn = warn
        self._started: list[Hook] = []
        # Those that do something at every step, of which most do not.
        self._at_steps: list[Hook] = []
        self._sharing: list[Hook] = []
        self._lengths: list[int] = []  # of what each hook shares

    def add(self, *hooks: Hook) -> None:
        self.hooks += hooks
        self._at_steps += [one for one in hooks if _has_own(one, "on_step_end")]
        self._sharing += [one for one in hooks if _has_own(one, "share") or _has_own(one, "on_shared")]

    def on_run_start(self, start: RunStart) -> None:
        for hook in self.hooks:
            hook.on_run_start(start)
            self._started.append(hook)

    def on_step_end(self, end: StepEnd) -> None:
        for hook in self._at_steps:
            hook.on_step_end(end)

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        for hook in self.hooks:
            hook.on_metrics(line, interval)

    def on_evaluation(self, line: Line) -> None:
        for hook in self.hooks:
            hook.on_evaluation(line)

    def on_activity(self, step: int, activity: str) -> None:
        for hook in self.hooks:
            hook.on_activity(step, activity)

    def on_save(self, saved: Saved) -> None:
        for hook in self.hooks:
            hook.on_save(saved)

    def on_stop(self, step: int, reason: str) -> None:
        for hook in self.hooks:
            hook.on_stop(step, reason)

    def on_fault(self, fault: Fault) -> None:
        for hook in self.hooks:
            self._call(partial(hook.on_fault, fault), warns=fault.error is not None)

    def on_run_end(self, error: BaseException | None) -> None:
        with ExitStack() as stack:
            for hook in self._started:
                stack.callback(self._call, partial(hook.on_run_end, error), warns=error is not None)

    def _call(self, event: Callable[[], None], *, warns: bool) -> None:
        try:
            event()
        except Exception as error:
            if not warns:
                raise
            self.warn(f"a hook failed, too: {error!r}.")

    def share(self) -> Values:
        shared = [hook.share() for hook in self._sharing]
        self._lengths = [len(values) for values in shared]
        return [value for values in shared for value in values]

    def on_shared(self, values: Sequence[Values]) -> None:
        """Give each hook its own part of what was shared."""
        begin = 0
        for hook, length in zip(self._sharing, self._lengths, strict=True):
            hook.on_shared([one[begin : begin + length] for one in values])
            begin += length


def _has_own(hook: Hook, event: str) -> bool:
    """Whether it does something at this event."""
    return getattr(getattr(hook, event), "__func__", None) is not getattr(Hook, event)
