"""The hooks of every run: metric sinks, progress, the watchdog and straggler detection."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.config.load import config_values
from shoal.config.schema_train import SlowRankConfig
from shoal.mistakes import UserMistake
from shoal.observe.metrics import About, Line
from shoal.observe.progress import Reporter
from shoal.observe.sinks import Sinks, newest_step
from shoal.parallel.ranks import Ranks
from shoal.resilience.stragglers import RankTimer, StragglerDetector
from shoal.resilience.watchdog import Watchdog, print_sentence
from shoal.train.compare import Comparison
from shoal.train.events import RunEvents
from shoal.train.gpu_watch import GpuWatch, monitor_of
from shoal.train.hooks import Fault, Hook, LogInterval, RunStart, StepEnd, Values
from shoal.train.job import AnyJob, Job
from shoal.train.profile import Profiler
from shoal.train.report import ReportPage
from shoal.train.slow_data import SlowDataWarning


@dataclass(frozen=True)
class LaunchContext:
    """What the launcher provides to a rank."""

    heartbeats: Path | None = None  # a file of this node, through which each rank's watchdog sees the others
    tell: Callable[[str], None] = print_sentence  # says why a hung run is ended
    command: Sequence[str] = ()  # with which the user started the run
    profile: int | None = None  # steps to profile


STARTED_ALONE = LaunchContext()


def default_hooks(job: AnyJob, context: LaunchContext, others: Sequence[Hook] = ()) -> list[Hook]:
    """The hooks of every run, and `others`, in the order in which they see its events."""
    config, ranks, reporter = job.config, job.ranks, job.reporter
    folder = job.run.logs / f"hang-{job.log.attempt}"
    watchdog = Watchdog(folder, ranks, config.train.hang_timeout, heartbeats=context.heartbeats, tell=context.tell)
    profiler = [] if context.profile is None else [Profiler(context.profile, job.log, reporter)]
    return [
        ReportPage(config_values(job.resolved.requested), reporter.warn),  # first, so that it ends last
        MetricSinks(job),
        RunEvents(job.log.attempt, context.command, str(job.plan["machine"]["device"])),
        GpuWatch(monitor_of(ranks.device), job.log, config),
        ProgressLines(reporter),
        *([Comparison(job.run, job.resolved, job.plan, reporter)] if isinstance(job, Job) else []),
        job.interval,
        StragglerDetection(config.train.slow_rank, ranks, reporter.warn),
        *([SlowDataWarning(config.data, reporter.warn)] if isinstance(job, Job) else []),
        *others,
        *profiler,
        HangDetection(watchdog),  # last, so that it ends first: what others do at the end may take long
    ]


class MetricSinks(Hook):
    """Writes log lines and evaluations to `metrics.jsonl` and to the sinks of `log.to`, on rank 0."""

    def __init__(self, job: AnyJob) -> None:
        self.job = job
        self._sinks: Sinks | None = None

    def on_run_start(self, start: RunStart) -> None:
        if not start.ranks.first:
            return
        job, log = self.job, self.job.config.log
        about = About(
            start.folder,
            job.config.name,
            config_values(job.config),
            job.plan,
            start.step,
            log.wandb.model_dump(),
            log.mlflow.model_dump(),
            newest_step(start.folder),
        )
        try:
            self._sinks = Sinks(log.to, about, job.reporter.warn)
        except OSError as error:
            raise UserMistake(f"{error.filename or start.folder} cannot be written: {error.strerror}.") from None

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        if self._sinks is not None:
            self._sinks.write(line)

    def on_evaluation(self, line: Line) -> None:
        if self._sinks is not None:
            self._sinks.write(line)

    def on_run_end(self, error: BaseException | None) -> None:
        if self._sinks is not None:
            self._sinks.close()


class ProgressLines(Hook):
    """Prints progress on standard error."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.steps = 0

    def on_run_start(self, start: RunStart) -> None:
        self.steps = start.steps
        self.reporter.begin(start.step, start.steps)

    def on_step_end(self, end: StepEnd) -> None:
        self.reporter.advance(end.step)

    def on_metrics(self, line: Line, interval: LogInterval) -> None:
        self.reporter.report(line, self.steps)

    def on_evaluation(self, line: Line) -> None:
        self.reporter.report_evaluation(line)

    def on_run_end(self, error: BaseException | None) -> None:
        self.reporter.end()


class HangDetection(Hook):
    """Every step and activity is a heartbeat for the watchdog. It is paused until the first step, which compiles, and
    during a rollback, which reads a checkpoint."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.watchdog = watchdog

    def on_run_start(self, start: RunStart) -> None:
        self.watchdog.start()

    def on_step_end(self, end: StepEnd) -> None:
        self.watchdog.heartbeat(end.step, "training")

    def on_activity(self, step: int, activity: str) -> None:
        self.watchdog.heartbeat(step, activity)

    def on_fault(self, fault: Fault) -> None:
        if fault.error is None:
            self.watchdog.pause(fault.step, "rolling back")

    def on_run_end(self, error: BaseException | None) -> None:
        self.watchdog.stop(failed=error is not None)


class StragglerDetection(Hook):
    """Shares the times of this rank alone; rank 0 compares those of all ranks."""

    def __init__(self, limit: SlowRankConfig, ranks: Ranks, warn: Callable[[str], None]) -> None:
        self.ranks = ranks
        self.timer: RankTimer | None = None
        self.detector = StragglerDetector(limit, ranks.world_size, warn)
        self._times = (0.0, 0.0)
        self._step_seconds = 0.0

    def on_run_start(self, start: RunStart) -> None:
        self.timer = RankTimer(start.ranks)

    def on_step_end(self, end: StepEnd) -> None:
        assert self.timer is not None
        self._times = self.timer.after_step(end.data_seconds)
        self._step_seconds = end.step_seconds

    def share(self) -> Values:
        return self._times

    def on_shared(self, values: Sequence[Values]) -> None:
        if self.ranks.first:  # the rank that prints warnings
            self.detector.update([(matmul, data) for matmul, data in values], self._step_seconds)
